"""Before Ray connects, a cluster is asked whether it wants a token: what fits is taken, what does not is one sentence
with the variable's name. The servers here answer as Ray's do (tests/cluster/test_joining.py asks Ray itself). Run by
test_ray_authentication.py in a process of its own, since the mode is that of a whole process."""

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray._raylet import get_authentication_mode
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from ptf.compute.ray_authentication import MODE, TOKEN, TOKEN_PATH, of_cluster, own
from ptf.errors import UserError

RIGHT, WRONG = "a" * 32, "b" * 32


class Gcs(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    def __init__(self, token: str | None) -> None:
        self.token, self.given = token, list[str]()

    def GetClusterId(self, request: Any, context: grpc.ServicerContext) -> Any:
        given = dict(context.invocation_metadata()).get("authorization", "")
        self.given.append(given)
        if self.token and given != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return gcs_service_pb2.GetClusterIdReply(cluster_id=b"x")


@pytest.fixture(params=["joined", "jobs"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts what answers like a cluster with this token, or with none; its address, and what it was shown."""
    ends = []

    def start(token: str | None) -> tuple[str, list[str]]:
        if request.param == "joined":
            servicer, server = Gcs(token), grpc.server(ThreadPoolExecutor(2))
            gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            ends.append(lambda: server.stop(None).wait())
            return f"127.0.0.1:{port}", servicer.given
        given: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given.append(self.headers.get("authorization", ""))
                status = 200 if token in (None, given[-1].removeprefix("Bearer ")) else 403 if given[-1] else 401
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        ends.extend([thread.join, http.server_close, http.shutdown])
        return f"http://127.0.0.1:{http.server_port}", given

    yield start
    for end in reversed(ends):
        end()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets Ray's variables, and no others of them; a `file` is one that holds this token."""

    def give(**values: str) -> None:
        for name in (MODE, TOKEN, TOKEN_PATH):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        for name, value in values.items():
            if name == TOKEN_PATH:
                (tmp_path / "token").write_text(value)
            monkeypatch.setenv(name, str(tmp_path / "token") if name == TOKEN_PATH else value)

    return give


@pytest.mark.parametrize(
    ("has", "given", "mode"),
    [
        (None, {}, "disabled"),  # an ordinary `ray start --head`
        (None, {MODE: "disabled"}, "disabled"),
        (None, {MODE: "disabled", TOKEN: RIGHT}, "disabled"),
        (RIGHT, {TOKEN: RIGHT}, "token"),
        (RIGHT, {MODE: "token", TOKEN_PATH: f"{RIGHT}\n"}, "token"),
    ],
)
def test_the_mode_of_a_cluster_is_taken(
    cluster: Any, environment: Any, has: str | None, given: dict[str, str], mode: str
) -> None:
    environment(**given)
    with of_cluster(cluster(has)[0]):
        assert os.environ[MODE] == mode
        assert int(get_authentication_mode()) == (mode == "token")
    assert os.environ.get(MODE) == given.get(MODE)


@pytest.mark.parametrize(
    ("has", "given", "said"),
    [
        (None, {MODE: "token"}, "has no token, but RAY_AUTH_MODE is token here; set RAY_AUTH_MODE=disabled"),
        (None, {TOKEN: RIGHT}, "has no token, but RAY_AUTH_TOKEN is set here; set RAY_AUTH_MODE=disabled"),
        (None, {TOKEN_PATH: RIGHT}, "has no token, but RAY_AUTH_TOKEN_PATH is set here; set RAY_AUTH_MODE=disabled"),
        (
            RIGHT,
            {},
            r"needs a token, and there is none in .*/\.ray/auth_token; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH",
        ),
        (
            RIGHT,
            {MODE: "disabled", TOKEN: RIGHT},
            "needs a token, but RAY_AUTH_MODE is disabled here; unset it, and give the token in RAY_AUTH_TOKEN",
        ),
        (RIGHT, {TOKEN: WRONG}, "refuses the token in RAY_AUTH_TOKEN; set"),
        (RIGHT, {TOKEN_PATH: WRONG}, r"refuses the token in .*/token \(RAY_AUTH_TOKEN_PATH\); set"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    cluster: Any, environment: Any, has: str | None, given: dict[str, str], said: str
) -> None:
    environment(**given)
    address, shown = cluster(has)
    with (
        pytest.raises(UserError, match=f"^compute.address: the Ray cluster at {re.escape(address)} {said}") as caught,
        of_cluster(address),
    ):
        pass
    message = str(caught.value)
    assert "\n" not in message
    assert RIGHT not in message
    assert WRONG not in message
    assert shown[0] == ""  # a cluster that wants no token is shown none
    assert has or not any(shown)


def test_a_token_at_home_is_not_shown_to_a_cluster_that_wants_none(
    cluster: Any, environment: Any, tmp_path: Path
) -> None:
    environment()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(RIGHT)  # every Ray that somebody starts on a machine leaves one
    address, shown = cluster(None)
    with of_cluster(address):
        assert os.environ[MODE] == "disabled"
    assert shown == [""]
    with of_cluster(cluster(RIGHT)[0]):
        assert os.environ[MODE] == "token"


def test_a_ray_of_our_own_has_its_own_token_whatever_the_environment_says(environment: Any, tmp_path: Path) -> None:
    environment(**{MODE: "disabled", TOKEN: WRONG})
    with own(tmp_path / "own"):
        assert (os.environ[MODE], os.environ[TOKEN_PATH], TOKEN in os.environ) == (
            "token",
            str(tmp_path / "own"),
            False,
        )
        assert int(get_authentication_mode()) == 1
    assert (os.environ[MODE], os.environ[TOKEN], TOKEN_PATH in os.environ) == ("disabled", WRONG, False)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:9"])
def test_nobody_there_is_no_matter_of_tokens(environment: Any, address: str) -> None:
    environment()
    with pytest.raises(ConnectionError), of_cluster(address):
        pass
