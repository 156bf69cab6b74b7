"""Environments of OpenEnv: sessions, actions, refusals and faults, with a server of ours in the form of its messages,
and with the library's own where `make .venv-openenv/ready` has made its interpreter."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from ptf.errors import UserError
from ptf.rl.environments.openenv import REFUSED, OpenEnv
from ptf.rl.environments.protocol import EnvironmentFault
from tests.conftest import ROOT
from tests.rl.openenv_server import served
from tests.rl.players import environments, play
from tests.server_process import free_port, listening

USE = "ptf.rl.environments.openenv:OpenEnv"
LIBRARY = ROOT / ".venv-openenv" / "bin" / "python"
ROWS = [{"seed": seed, "low": 2} for seed in range(8)]
GAME = {"action": "guess", "observation": "hint", "instruction": "Guess.", "columns": ["low"]}


@pytest.fixture(scope="module", params=["ours", "library"])
def url(request):
    if request.param == "ours":
        with served(16) as (address, _):
            yield address
        return
    if not LIBRARY.exists():
        pytest.skip("needs make .venv-openenv/ready")
    server = str(Path(__file__).with_name("openenv_server.py"))
    with listening(lambda port: [str(LIBRARY), server, str(port), "16"]) as port:
        yield f"http://127.0.0.1:{port}"


def upwards(messages):
    """Guess one number after the other."""
    return str(2 + len(messages) // 2)


def test_episodes_are_sessions_of_their_own(url) -> None:
    with environments(USE, {"url": url, **GAME}) as made:
        played = play(made, upwards, ROWS)
        again = play(made, upwards, ROWS)
    assert [one.messages for one in played] == [one.messages for one in again]
    assert len({str(one.messages) for one in played}) >= 3
    assert {one.reward for one in played} == {0.0, 1.0}
    for one in played:
        assert one.messages[0]["content"] == "Guess.\nfrom 2 to 9"
        assert one.results[-1].done
        assert one.results[-1].environment_messages == []
        assert all(message["content"] == "higher" for message in one.messages[2::2])


def test_a_refused_action_is_told_and_costs(url) -> None:
    with environments(USE, {"url": url, **GAME, "penalty": 0.25}) as made:
        (played,) = play(made, lambda messages: "five" if len(messages) == 1 else "5", ROWS[:1])
    assert played.messages[2]["content"].startswith("Your action was refused: ")
    assert "integer" in played.messages[2]["content"]
    assert played.results[0].reward == -0.25
    assert not played.results[0].done


def test_an_error_of_the_server_is_one_of_the_environment(url) -> None:
    with environments(USE, {"url": url, **GAME}) as made, pytest.raises(EnvironmentFault, match="unlucky"):
        play(made, lambda _: "13", ROWS[:1])


def test_an_action_of_another_form_is_made_by_a_plugin() -> None:
    action = {"use": "tests.rl.openenv_server:as_guess", "args": {"name": "guess"}}
    with served(1) as (url, sent), environments(USE, {"url": url, "action": action}) as made:
        (played,) = play(made, lambda _: "[5]", ROWS[:1])
    assert [message["data"] for message in sent[1:]] == [{"guess": 5}] * len(played.results)
    assert sent[0] == {"type": "reset", "data": {"seed": 0}}
    assert json.loads(played.messages[0]["content"]) == {"hint": "from 1 to 9"}, "all fields, as JSON"


def test_more_sessions_than_the_server_allows_are_named_and_ended_ones_are_free() -> None:
    async def use(url):
        first, second = (OpenEnv(ROWS[0], 0, url=url, **GAME) for _ in range(2))
        await first.reset()
        with pytest.raises(
            RuntimeError, match=r"CAPACITY_REACHED: 1/1 sessions active; it must allow as many sessions"
        ):
            await second.reset()
        await first.close()
        await second.close()
        for _ in range(100):  # until the server has noticed
            third = OpenEnv(ROWS[0], 0, url=url, **GAME)
            try:
                return await third.reset()
            except RuntimeError:
                await asyncio.sleep(0.05)
            finally:
                await third.close()

    with served(1) as (url, _):
        assert asyncio.run(use(url))


def test_a_server_that_is_not_there_or_silent_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = OpenEnv(ROWS[0], 0, url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(TimeoutError):
            asyncio.run(environment.reset())
    with pytest.raises(OSError, match=r"refused|Connect"):
        asyncio.run(OpenEnv(ROWS[0], 0, url=f"http://127.0.0.1:{free_port()}").reset())
    with pytest.raises(UserError, match="no address of the form"):
        OpenEnv({}, 0, url="localhost:8000")


class Socket:
    """A server whose answers are given."""

    def __init__(self, *answers: dict) -> None:
        self.answers, self.sent = [json.dumps(answer) for answer in answers], list[dict]()

    async def send(self, line: str) -> None:
        self.sent.append(json.loads(line))

    async def recv(self) -> str:
        return self.answers.pop(0)


def test_an_action_may_be_refused_but_a_session_may_not() -> None:
    refusal = {"type": "error", "data": {"code": REFUSED, "message": "no", "errors": [{"msg": "a"}, {"msg": "b"}]}}
    other = {"type": "error", "data": {"code": "BROKEN", "message": "gone"}}
    environment = OpenEnv({"seed": 1}, 0, url="http://here:1", penalty=0.25)
    environment.socket = socket = Socket(refusal, refusal, other)

    async def played() -> None:
        result = await environment.step("x")
        assert (result.reward, result.done) == (-0.25, False)
        assert result.environment_messages[0]["content"] == "Your action was refused: a; b"
        with pytest.raises(RuntimeError, match=f"answers reset with {REFUSED}: no"):
            await environment.ask("reset", {})
        with pytest.raises(RuntimeError, match="answers step with BROKEN: gone"):
            await environment.step("x")

    asyncio.run(played())
    assert [one["type"] for one in socket.sent] == ["step", "reset", "step"]
