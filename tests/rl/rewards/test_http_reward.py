"""A reward of a server: what it answers is a number or a fault, in bounded time and size, and no secret is shown."""

import asyncio
import datetime
import email.utils
import gzip
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from ptf.config import Plugin
from ptf.data.trajectory import NoResult, Reward
from ptf.errors import UserError
from ptf.rl.rewards.calls import EpisodeView, checked_reward
from ptf.rl.rewards.http_reward import HttpReward
from ptf.rl.rewards.scoring import RewardWorkers
from ptf.rl.rewards.server_reward import LONGEST_WAIT_S, RequestFault, ServerReward, retry_after
from ptf.rl.worker_messages import Fault
from tests.rl.rewards.loopback import Reply, Server, serving

SECRET = "sesame-open-0123456789"


def score(server: Server, row: dict[str, Any] | None = None, text: str = "t", **args: Any) -> float:
    reward = HttpReward(url=f"{server.url}/score", **{"wait_s": 0.01, **args})
    return asyncio.run(reward(row or {}, text))


def test_row_and_text_are_sent_and_the_number_is_the_reward() -> None:
    with serving(lambda _, body: Reply({"reward": len(body["text"]), "more": None})) as server:
        assert score(server, {"answer": "é", "n": [1]}, "four") == 4
    assert [(path, body) for path, _, body in server.requests] == [
        ("/score", {"row": {"answer": "é", "n": [1]}, "text": "four"})
    ]


def test_the_episode_is_sent_if_the_config_asks_for_it() -> None:
    ids = np.array([3, 4], np.int32)
    episode = EpisodeView(({"role": "user"},), ids, ids, np.array([-0.5, 0.0], np.float32), ids, False, "a")
    with serving(lambda _, body: Reply({"reward": len(body.get("episode", ()))})) as server:
        reward = HttpReward(url=server.url, send_episode=True)
        assert asyncio.run(reward({}, "t", episode=episode)) == 7
    sent = server.requests[0][2]["episode"]
    assert sent["sampled_ids"] == [3, 4]
    assert sent["logprobs"] == [-0.5, 0.0]
    assert sent["complete"] is False


@pytest.mark.parametrize(
    "fault", [Reply(status=429, headers={"Retry-After": "0"}), Reply(status=503), Reply(status=408), Reply(closes=True)]
)
def test_a_fault_that_may_pass_is_tried_again(fault: Reply) -> None:
    with serving(lambda number, _: fault if number < 2 else Reply({"reward": 1.5})) as server:
        assert score(server) == 1.5
    assert len(server.requests) == 3
    with serving(lambda *_: fault) as server, pytest.raises(RequestFault, match=r"request 3 of 3"):
        score(server, retries=2)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(b"no such\n\x1b[31mcolumn", status=422), r"^HTTP 422: no such \?\[31mcolumn$"),
        (Reply(status=401), r"^HTTP 401: \(empty\)$"),
        (Reply(status=302, headers={"Location": "http://elsewhere/"}), "redirects are refused.*http://elsewhere/"),
        (Reply(b"garbage \xff\xfe"), "is no JSON: garbage"),
        (Reply(b"[" * 100_000), "is no JSON"),
        (Reply({"score": 1}), "is not {\"reward\": NUMBER}: {'score': 1}"),
        (Reply({"reward": "0.5"}), 'is not {"reward": NUMBER}'),
        (Reply({"reward": True}), 'is not {"reward": NUMBER}'),
        (Reply({"reward": None}), 'is not {"reward": NUMBER}'),
        (Reply([1.0]), 'is not {"reward": NUMBER}'),
        (Reply(b" " * 2000), "longer than 1000 bytes"),
        (Reply(gzip.compress(b'{"reward": 1}'), headers={"Content-Encoding": "gzip"}), "is compressed"),
    ],
)
def test_any_other_answer_is_a_fault_at_once(reply: Reply, message: str) -> None:
    with serving(lambda *_: reply) as server, pytest.raises(RequestFault, match=message):
        score(server, max_bytes=1000 if len(str(reply.body)) < 5000 else 1 << 20)
    assert len(server.requests) == 1, "neither tried again nor redirected"


def test_a_row_that_json_cannot_hold_is_a_fault() -> None:
    with serving(lambda *_: Reply({"reward": 1})) as server:
        for value in (datetime.date(2026, 1, 1), b"bytes"):
            with pytest.raises(RequestFault, match="the column 'value' of the row cannot be written as JSON"):
                score(server, {"value": value})
    assert server.requests == []


def test_a_number_that_json_does_not_have_is_sent_as_null_and_its_column_named(capsys: Any) -> None:
    row = {"answer": 2.5, "unused": {"scores": [float("nan"), 1.0, float("-inf")]}}
    with serving(lambda *_: Reply({"reward": 1})) as server:
        assert score(server, row) == 1.0
    assert server.requests[0][2]["row"] == {"answer": 2.5, "unused": {"scores": [None, 1.0, None]}}
    assert "column 'unused' has numbers that JSON does not have" in capsys.readouterr().out


def test_a_secret_is_sent_and_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER", f"Bearer {SECRET}")
    reply = Reply(f"{'x' * 290} your token is Bearer {SECRET}, not known".encode(), status=403)
    with serving(lambda *_: reply) as server, pytest.raises(RequestFault) as caught:
        score(server, headers_from_env={"Authorization": "SCORER"})
    assert server.requests[0][1]["Authorization"] == f"Bearer {SECRET}"
    assert not any(SECRET[:n] in str(caught.value) for n in range(4, len(SECRET)))
    for value, message in (("", "SCORER .*is not set"), ("a\nb" + SECRET, "characters that a header cannot have")):
        monkeypatch.setenv("SCORER", value)
        with pytest.raises(UserError, match=message) as refused:
            HttpReward.first_lines(url="http://127.0.0.1", headers_from_env={"Authorization": "SCORER"})
        assert SECRET not in str(refused.value)


def test_this_machine_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lambda *_: Reply({"reward": 1})) as server:
        assert score(server, retries=0) == 1


def test_one_request_has_its_own_limit() -> None:
    release = threading.Event()

    def hang(number: int, _: Any) -> Reply:
        if number == 0:
            release.wait(20)
        return Reply({"reward": 2})

    with serving(hang) as server:
        assert score(server, timeout_s=0.2) == 2
        server.requests.clear()
        with pytest.raises(RequestFault, match=r"no reply within 0.2 s"):
            score(server, timeout_s=0.2, retries=0)
        release.set()


def test_the_wait_is_that_of_the_server_or_doubles_and_is_bounded() -> None:
    endpoint = ServerReward(url="http://127.0.0.1", wait_s=0.5)
    waits = [endpoint._wait(attempt, None) for attempt in range(12)]
    assert all(0.25 * 2**attempt <= wait <= 0.5 * 2**attempt for attempt, wait in enumerate(waits[:6]))
    assert max(waits) <= LONGEST_WAIT_S
    assert endpoint._wait(0, 7.0) == 7.0
    assert endpoint._wait(0, 1e9) == LONGEST_WAIT_S
    assert retry_after("3") == 3.0
    assert retry_after(email.utils.formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=5)
    assert retry_after(email.utils.formatdate(0)) == 0.0
    assert [retry_after(value) for value in ("", "soon", "-1", "1e999x", "٣x")] == [None] * 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "ftp://host"}, "is no address"),
        ({"url": "localhost:80"}, "is no address"),
        ({"url": 3}, "is no address"),
        ({"url": "http://me:word@host"}, "no user and password"),
        ({"retries": -1}, "retries: it must be"),
        ({"retries": 1.5}, "retries: it must be"),
        ({"timeout_s": "5"}, "timeout_s: it must be"),
        ({"timeout_s": float("nan")}, "timeout_s: it must be"),
        ({"max_concurrent_calls": 0}, "max_concurrent_calls: it must be"),
        ({"send_episode": "no"}, "send_episode: it must be"),
        ({"headers_from_env": ["A"]}, "headers_from_env: it must be"),
        ({"headers_from_env": {"A": None}}, "headers_from_env: it must be"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HttpReward.check_arguments(**{"url": "http://host", **args})


HANGING = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connections = []
while True:
    connections.append(server.accept()[0])
    connections[-1].recv(1)
    print("asked", flush=True)
"""


def test_a_server_that_is_killed_in_the_middle_of_calls_gives_no_result() -> None:
    server = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    plugin = Plugin(
        use="ptf.rl.rewards:http",
        args={"url": f"http://127.0.0.1:{server.stdout.readline().strip()}", "retries": 2, "wait_s": 0.01},
    )
    rewards = RewardWorkers(plugin, timeout_s=30.0, retries=0)
    try:
        asked = threading.Thread(target=lambda: (server.stdout.readline(), server.send_signal(signal.SIGKILL)))
        asked.start()
        outcomes = rewards.score([({}, "a"), ({}, "b")])
        asked.join(30)
    finally:
        rewards.close()
        server.kill()
        server.wait(10)
    assert all(isinstance(outcome, NoResult) and "ConnectError" in outcome.reason for outcome in outcomes)


def test_calls_overlap_and_one_that_hangs_has_no_result() -> None:
    together, release = threading.Barrier(8), threading.Event()

    def answer(_: int, body: Any) -> Reply:
        if body["text"] == "hang":
            release.wait(20)
        else:
            together.wait(20)
        return Reply({"reward": float(body["text"] if body["text"] != "hang" else 0)})

    with serving(answer) as server:
        rewards = RewardWorkers(Plugin(use="ptf.rl.rewards:http", args={"url": server.url}), timeout_s=1.5, retries=0)
        try:
            outcomes = rewards.score([({}, text) for text in ["hang", *map(str, range(8))]])
        finally:
            rewards.close()
            release.set()
    assert outcomes == [NoResult("took longer than 1.5 s"), *(Reward(float(n)) for n in range(8))]


def test_noise_instead_of_http_is_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(1000)
                connection.sendall(b"\x00" * 100)
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(RequestFault, match="RemoteProtocolError"):
            score(server, retries=1)
        thread.join(10)


def test_numbers_that_json_lacks_are_no_reward() -> None:
    """NaN is a number for json.loads, and the process refuses it."""
    for text in ("NaN", "Infinity", "1e400", "1" + "0" * 400):
        with serving(lambda *_, text=text: Reply(f'{{"reward": {text}}}'.encode())) as server:
            assert isinstance(checked_reward(score(server)), Fault)
