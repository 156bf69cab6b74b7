"""Tools of an MCP server as an environment, over stdio and HTTP, and what happens when the server fails."""

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ptf.data.trajectory import Generation, Prompt, Reward, samples_of
from ptf.errors import UserError
from ptf.rl.engines.protocol import Sampling
from ptf.rl.environments.protocol import EnvironmentFault
from ptf.rl.environments.rollout import EnvironmentRollout
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import Limits
from tests.data.templates import templated
from tests.rl.players import environments, play
from tests.server_process import listening

pytest.importorskip("mcp", reason="needs pip install 'ptf[mcp]'")

from ptf.rl.environments.mcp import Mcp
from tests.waiting import until

USE = "ptf.rl.environments.mcp:Mcp"
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
SHOP = {"command": [*SERVER, "stdio"], "reward": {"use": "ptf.rl.rewards:exact"}, "max_result_characters": 50}
ROW = {"messages": [{"role": "user", "content": "What do three shoes cost?"}], "answer": "120"}


def calls(*made, before=""):
    return before + "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in made
    )


def says(*texts):
    return lambda messages: texts[sum(message["role"] == "assistant" for message in messages)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Says:
    """An engine that gives these answers, one after the other."""

    name, version, in_batches = "says", 0, False

    def __init__(self, texts, tokenizer):
        self.texts, self.tokenizer = iter(texts), tokenizer

    async def generate(self, request):
        ids = np.array([*self.tokenizer.encode(next(self.texts)), self.tokenizer.stop_ids[0]], np.int32)
        return Generation(request.context, ids, -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32), True)


@pytest.fixture(scope="module")
def url():
    with listening(lambda port: [*SERVER, "http", str(port)]) as port:
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.fixture(scope="module")
def shop():
    with environments(USE, {**SHOP, "timeout_s": 2.0}, retries=1) as made:
        yield made


def test_tools_are_called_and_the_answer_is_scored(shop) -> None:
    (played,) = play(shop, says(calls(("price", {"item": "shoe", "number": 3}), before="Let me ask. "), "120"), [ROW])
    (wrong,) = play(shop, says("forty"), [ROW])
    assert (played.reward, wrong.reward) == (1.0, 0.0)
    user, own, result, answer = played.messages
    assert (user, answer) == (ROW["messages"][0], {"role": "assistant", "content": "120"})
    assert own["content"].strip() == "Let me ask."
    (call,) = own["tool_calls"]
    assert call["function"]["name"] == "price"
    assert json.loads(call["function"]["arguments"]) == {"item": "shoe", "number": 3}
    assert result == {"role": "tool", "tool_call_id": call["id"], "name": "price", "content": "120"}
    tool = next(tool["function"] for tool in played.tools if tool["function"]["name"] == "price")
    assert tool["description"] == "Return the price of some pieces of an item."
    assert tool["parameters"]["properties"]["number"]["type"] == "integer"
    assert len(played.tools) == 5  # of both pages


def test_each_episode_has_a_server_of_its_own(shop) -> None:
    visits = says(calls(("visit", {})), calls(("visit", {}), ("visit", {})), "120")
    for played in play(shop, visits, [ROW, {"prompt": "Visit.", "answer": "0"}]):
        assert [message["content"] for message in played.messages if message["role"] == "tool"] == ["1", "2", "3"]
        ids = [call["id"] for message in played.messages for call in message.get("tool_calls", ())]
        assert len(set(ids)) == 3


WRONG = (("prices", {}), ("price", {"item": "car"}), ("price", {}), ("price", [1]), ("catalogue", {"lines": 90}))


def raise_unless_told(results):
    assert results[0].startswith("Error: there is no tool prices; the tools are price, visit")
    assert results[1] == "there is no car in this shop"
    assert "item" in results[2] or "Error" in results[2]
    assert results[3] == "Error: the arguments of price must be an object"
    assert results[4] == "x" * 50 + "\n[40 more characters]"


def test_wrong_calls_are_answered_and_are_no_fault(shop) -> None:
    (played,) = play(shop, says(calls(*WRONG), calls(("price", {"item": "hat"})), "120"), [ROW])
    results = [message["content"] for message in played.messages if message["role"] == "tool"]
    raise_unless_told(results)
    assert results[5] == "15\n[image]"
    assert (played.reward, shop.take_retries()) == (1.0, 0)


def test_a_server_over_http(url, monkeypatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which this machine's own servers need not
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def played():
        environment = Mcp(ROW, 0, **{**SHOP, "command": [], "url": url, "timeout_s": 60.0})
        await environment.reset()
        wrong = await environment.step(calls(*WRONG))
        raise_unless_told([message["content"] for message in wrong.environment_messages])
        answer = await environment.step("120")
        await environment.close()
        return answer, environment.tools

    answer, tools = asyncio.run(played())
    assert (answer.reward, answer.done, len(tools)) == (1.0, True, 5)


@pytest.mark.parametrize(("how", "words"), [("die", "Connection closed"), ("hang", "no result of fail within 2 s")])
def test_a_server_that_fails_is_an_error_and_leaves_no_process(how, words, shop, tmp_path) -> None:
    file = tmp_path / "ids"
    policy = says(calls(("processes", {"file": str(file)})), calls(("fail", {"how": how})), "120")
    with pytest.raises(EnvironmentFault, match=words):
        play(shop, policy, [ROW])
    assert shop.take_retries() == 1
    pids = [int(number) for number in file.read_text().split()]
    assert len(pids) == 4  # it was played again, with another server
    until(lambda: not any(map(is_alive, pids)), 30)


def test_the_sampled_calls_are_the_context_of_the_next_answer(shop, shared) -> None:
    """With a real template, an episode with tool calls is one training sample with exactly the sampled tokens."""
    tokenizer = templated("qwen3-instruct-2507", shared)
    texts = [calls(("price", {"item": "shoe", "number": 3})), "120"]
    limits = Limits(Sampling(1000, 1.0, tokenizer.stop_ids), 10_000)
    prompt = Prompt(np.zeros(0, np.int32), ROW, "a", 0)
    engine = Says(texts, tokenizer)
    (made,) = asyncio.run(
        run_all(engine, [Episode(prompt, limits, tokenizer, lambda turn: 0, EnvironmentRollout(shop, 8))])
    )
    assert (made.outcome, made.complete) == (Reward(1.0), True)
    (sample,) = samples_of(made)
    trained = sample.tokens[sample.loss_weights > 0]
    assert tokenizer.decode(trained) == f"{texts[0]}<|im_end|>{texts[1]}<|im_end|>"
    assert "Return the price of some pieces of an item." in tokenizer.decode(sample.tokens)
    assert "<tool_response>\n120\n</tool_response>" in tokenizer.decode(sample.tokens)


def test_nothing_is_left_when_the_worker_is_killed(shop, tmp_path) -> None:
    file = tmp_path / "ids"

    async def begun() -> list[int]:
        state, _, _ = await shop.reset(ROW, 0)
        await shop.step(state, calls(("processes", {"file": str(file)})))
        return [int(number) for number in file.read_text().split()]

    pids = asyncio.run(begun())
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    os.kill(shop.processes[0].process.pid, 9)
    until(lambda: not any(map(is_alive, pids)), 30)


def test_what_cannot_be_reached_is_named() -> None:
    async def opened(**args):
        environment = Mcp(ROW, 0, **{**SHOP, **args})
        try:
            await environment.reset()
        finally:
            await environment.close()

    for args in ({"command": ["no-such-server"]}, {"command": [], "url": "http://127.0.0.1:9/mcp"}):
        with pytest.raises(ConnectionError, match="before its list of tools"):
            asyncio.run(opened(**args))


def test_the_arguments_must_fit() -> None:
    for args in ({"command": []}, {"url": "http://127.0.0.1:9/mcp"}, {"command": "my-server --all"}):
        with pytest.raises(UserError, match="a `command`, a list of words, or a `url`"):
            Mcp(ROW, 0, **{**SHOP, **args})
    with pytest.raises(UserError, match="did you mean hermes"):
        Mcp(ROW, 0, **{**SHOP, "format": "hermess"})
