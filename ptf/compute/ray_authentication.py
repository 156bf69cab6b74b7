"""How this process proves itself to Ray: by a token, or not at all.

The one idea: in the wrong mode Ray waits, or fails without saying why, so a cluster that is joined is first asked, without a token, whether it wants one, and
this process takes the mode that fits. What the environment demands stands: a mode or a token that does not fit is refused, and the variable is named. A Ray of
a run's own always has a token. Import this module before ray.
"""

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

from ptf.errors import UserError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ANSWER_S = 10.0  # for one answer of a cluster


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """These variables for the block, None: unset; Ray, which had read them when it was imported, reads them again. It is not told that they are as before
    again: a thread of Ray's that still wants its token would end the process. From a token to none only a process that has not been connected can change."""
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
    """For a Ray of the run's own, whose token is in that file."""
    return environment(**{MODE: "token", TOKEN: None, TOKEN_PATH: str(token)})


def of_cluster(address: str) -> contextlib.AbstractContextManager[None]:
    """For the cluster at `host:port`, or the one whose jobs `http://…` takes. Raises UserError where what this process has does not fit, ConnectionError where
    nobody answers."""
    asked = _asked_jobs if address.startswith(("http://", "https://")) else _asked
    return environment(**{MODE: _mode(address, lambda token: asked(address, token))})


def _mode(address: str, lets_in: Callable[[str | None], bool]) -> str:
    """The mode that fits a cluster, of which `lets_in` says whether it answers whoever has this token, or none."""
    cluster, mode = f"compute.address: the Ray cluster at {address}", os.environ.get(MODE, "").lower()
    if lets_in(None):
        demands = MODE if mode == "token" else next((name for name in (TOKEN, TOKEN_PATH) if os.environ.get(name) and mode != "disabled"), None)
        if demands:
            said = f"{MODE} is token" if demands == MODE else f"{demands} is set"
            raise UserError(f"{cluster} has no token, but {said} here; set {MODE}=disabled to join it without one, or start the cluster with that token")
        return "disabled"
    if mode not in ("", "token"):
        raise UserError(f"{cluster} wants a token, but {MODE} is {mode} here; unset it, and give the token in {TOKEN} or in the file that {TOKEN_PATH} names")
    token, where = _token()
    if not token:
        raise UserError(f"{cluster} wants a token, and there is none in {where}; set {TOKEN}, or {TOKEN_PATH} to the file that holds it")
    if not lets_in(token):
        raise UserError(f"{cluster} refuses the token in {where}; set {TOKEN} or {TOKEN_PATH} to the one that the cluster was started with")
    return "token"


def _token() -> tuple[str, str]:
    """The token that Ray would take, and where it is; an empty one where there is none."""
    if token := os.environ.get(TOKEN, "").strip():
        return token, TOKEN
    named = os.environ.get(TOKEN_PATH)
    file = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    where = f"{file} ({TOKEN_PATH})" if named else str(file)
    try:
        return file.read_text().strip(), where
    except OSError:
        return "", where


def _asked(address: str, token: str | None) -> bool:
    given = [("authorization", f"Bearer {token}")] if token else []
    with environment(**{MODE: "disabled"}), cast(grpc.Channel, init_grpc_channel(address.removeprefix("ray://"))) as channel:  # else it adds a token itself
        try:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), metadata=given, timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionError(f"{code.name.lower()}: {error.details()}") from None  # pyright: ignore[reportAttributeAccessIssue]
            return code != grpc.StatusCode.UNAUTHENTICATED  # whatever else it says, it listens
    return True


def _asked_jobs(address: str, token: str | None) -> bool:
    request = urllib.request.Request(f"{address.rstrip('/')}/api/version", headers={"authorization": f"Bearer {token}"} if token else {})
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
