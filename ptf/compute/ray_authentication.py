"""Authentication to Ray: by a token, or without one.

In the wrong mode Ray waits, or fails without a reason, so a cluster that is joined is first asked, without a token,
whether it needs one, and this process takes the mode that fits. Settings in the environment are respected: a mode or a
token that does not fit is refused, and the variable is named. A run's own Ray always has a token. Import this module
before ray.
"""

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, cast

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

from ptf.errors import Retryable, UserError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ANSWER_S = 10.0  # for one reply of a cluster
EVERY_S = 1.0  # between two attempts to connect
T = TypeVar("T")


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set these variables for the block (None: unset), and make Ray, which read them at import, read them again.

    Ray is not made to read the restored values: a thread of Ray that still needs its token would end the process. Only
    a process that has not been connected can change from a token to none.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def own(token: Path) -> contextlib.AbstractContextManager[None]:
    """Set the environment for a run's own Ray, whose token is in that file."""
    return environment(**{MODE: "token", TOKEN: None, TOKEN_PATH: str(token)})


def of_cluster(address: str) -> contextlib.AbstractContextManager[None]:
    """Set the environment for the cluster at `host:port`, or the one that takes jobs at `http://…`.

    Raises UserError if this process's settings do not fit, ConnectionError if nothing answers.
    """
    lets_in = _lets_in_jobs if address.startswith(("http://", "https://")) else _lets_in_gcs
    return environment(**{MODE: _mode(address, lambda token: lets_in(address, token))})


@contextlib.contextmanager
def connected(address: str, timeout_s: float, does: str, connect: Callable[[], T]) -> Iterator[T]:
    """Yield what `connect` returns, in the environment for the cluster; it is tried again for `timeout_s`.

    `does` says what a cluster does that can be connected to. Raises Retryable if none does in time.
    """
    deadline, is_reported = time.monotonic() + timeout_s, False
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(of_cluster(address))
                found = connect()
                break
            except (ConnectionError, RuntimeError) as error:
                stack.close()
                if time.monotonic() > deadline:
                    raise Retryable(
                        f"no Ray cluster {does} at {address} after {timeout_s:.0f} s: {one_line(error)}; "
                        "check compute.address"
                    ) from error
                if not is_reported:
                    why = one_line(error)
                    print(f"no Ray cluster {does} at {address} ({why}); trying again for {timeout_s:.0f} s", flush=True)
                is_reported = True
            time.sleep(EVERY_S)
        yield found


def one_line(error: Exception) -> str:
    """Return the beginning of an error's text, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _mode(address: str, lets_in: Callable[[str | None], bool]) -> str:
    """Return the mode that fits a cluster; `lets_in` tells whether it accepts a token, or none."""
    cluster, mode = f"compute.address: the Ray cluster at {address}", os.environ.get(MODE, "").lower()
    if lets_in(None):
        demands = (
            MODE
            if mode == "token"
            else next((name for name in (TOKEN, TOKEN_PATH) if os.environ.get(name) and mode != "disabled"), None)
        )
        if demands:
            setting = f"{MODE} is token" if demands == MODE else f"{demands} is set"
            raise UserError(
                f"{cluster} has no token, but {setting} here; set {MODE}=disabled to join it without one, "
                "or start the cluster with that token"
            )
        return "disabled"
    if mode not in ("", "token"):
        raise UserError(
            f"{cluster} needs a token, but {MODE} is {mode} here; unset it, "
            f"and give the token in {TOKEN} or in the file that {TOKEN_PATH} names"
        )
    token, where = _token()
    if not token:
        raise UserError(
            f"{cluster} needs a token, and there is none in {where}; set {TOKEN}, "
            f"or {TOKEN_PATH} to the file that holds it"
        )
    if not lets_in(token):
        raise UserError(
            f"{cluster} refuses the token in {where}; set {TOKEN} or {TOKEN_PATH} to the one that the cluster was "
            "started with"
        )
    return "token"


def _token() -> tuple[str, str]:
    """Return the token that Ray would use, and where it is; an empty one if there is none."""
    if token := os.environ.get(TOKEN, "").strip():
        return token, TOKEN
    named = os.environ.get(TOKEN_PATH)
    file = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    where = f"{file} ({TOKEN_PATH})" if named else str(file)
    try:
        return file.read_text().strip(), where
    except OSError:
        return "", where


def _lets_in_gcs(address: str, token: str | None) -> bool:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    # in another mode the channel adds a token itself
    with (
        environment(**{MODE: "disabled"}),
        cast(grpc.Channel, init_grpc_channel(address.removeprefix("ray://"))) as channel,
    ):
        try:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), metadata=metadata, timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionError(f"{code.name.lower()}: {error.details()}") from None
            return (
                code != grpc.StatusCode.UNAUTHENTICATED
            )  # any other error comes from a server that accepted the token
    return True


def _lets_in_jobs(address: str, token: str | None) -> bool:
    request = urllib.request.Request(
        f"{address.rstrip('/')}/api/version", headers={"authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return False
        raise ConnectionError(f"HTTP status {error.code}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ConnectionError(str(error)) from None
    return True
