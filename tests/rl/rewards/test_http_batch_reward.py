"""Several answers in one request: numbers in order, faults of their own answer, one by one after a fault."""

import asyncio
import contextlib
import re
from typing import Any

import numpy as np
import pytest

from ptf.config import Plugin
from ptf.config.reward_signature import RewardSignature, reward_fault
from ptf.data.trajectory import NoResult, Reward
from ptf.rl.rewards.calls import EpisodeView
from ptf.rl.rewards.http_reward import HttpBatchReward
from ptf.rl.rewards.scoring import RewardWorkers
from tests.rl.rewards.loopback import Reply, Server, serving

NAME = "ptf.rl.rewards:http_batch"


def scored(server: Server, texts: list[str], retries: int = 1, **args: Any) -> list[Any]:
    args = {"url": server.url, "wait_s": 0.01, "retries": 0, **args}
    with contextlib.closing(RewardWorkers(Plugin(use=NAME, args=args), timeout_s=20.0, retries=retries)) as rewards:
        return rewards.score([({"n": i}, text) for i, text in enumerate(texts)])


def numbers(_: int, body: Any) -> Reply:
    return Reply({"rewards": [float(item["text"]) + item["row"]["n"] for item in body["items"]]})


def test_answers_are_sent_together_and_each_has_its_number() -> None:
    with serving(numbers) as server:
        outcomes = scored(server, list("56789"), batch=2)
    assert outcomes == [Reward(float(2 * i + 5)) for i in range(5)]
    assert sorted(len(body["items"]) for _, _, body in server.requests) == [1, 2, 2]


def test_what_is_no_number_concerns_its_own_answer() -> None:
    for wrong in (None, "0.5", True, [1]):
        with serving(lambda *_, wrong=wrong: Reply({"rewards": [1, wrong, 2.5]})) as server:
            outcomes = scored(server, list("abc"), retries=0)
        assert (outcomes[0], outcomes[2]) == (Reward(1.0), Reward(2.5))
        assert isinstance(outcomes[1], NoResult), wrong


def test_after_a_request_that_fails_its_answers_are_sent_one_by_one() -> None:
    def answer(number: int, body: Any) -> Reply:
        fails = any(item["text"] == "bad" for item in body["items"])
        return Reply(b"cannot be scored", status=422) if fails else Reply({"rewards": [1.0] * len(body["items"])})

    with serving(answer) as server:
        outcomes = scored(server, ["a", "bad", "b"])
    assert (outcomes[0], outcomes[2]) == (Reward(1.0), Reward(1.0))
    assert isinstance(outcomes[1], NoResult)
    assert "HTTP 422: cannot be scored" in outcomes[1].reason
    assert [len(body["items"]) for _, _, body in server.requests] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"rewards": [1.0]}, "returned 1 numbers for 2 responses"),
        ({"rewards": 1.0}, r'not \{"rewards": \[NUMBER, …\]\}'),
        ({"reward": 1.0}, r'not \{"rewards": \[NUMBER, …\]\}'),
        ([1.0, 2.0], r'not \{"rewards": \[NUMBER, …\]\}'),
    ],
)
def test_another_form_is_a_fault_of_all(reply: Any, message: str) -> None:
    with serving(lambda *_: Reply(reply)) as server:
        outcomes = scored(server, ["a", "b"], retries=0)
    for outcome in outcomes:
        assert isinstance(outcome, NoResult)
        assert re.search(message, outcome.reason), outcome.reason


def test_the_episode_of_each_answer_is_sent_with_it() -> None:
    ids, numbers = np.array([3], np.int32), np.array([-0.5], np.float32)
    views = [EpisodeView((), ids, ids, numbers, ids, complete, "") for complete in (True, False)]
    with serving(lambda *_: Reply({"rewards": [1, 2]})) as server:
        reward = HttpBatchReward(url=server.url, send_episode=True)
        assert asyncio.run(reward([({}, "a"), ({}, "b")], episodes=views)) == [1, 2]
    assert [item["episode"]["complete"] for item in server.requests[0][2]["items"]] == [True, False]


def test_arguments_are_checked() -> None:
    assert RewardSignature.of(HttpBatchReward, {"url": "http://a/b", "batch": 7}) == RewardSignature("batch", False, 7)
    assert RewardSignature.of(HttpBatchReward, {"url": "http://a/b", "send_episode": True}).sees_episodes
    assert reward_fault(HttpBatchReward, NAME, {"url": "http://a/b", "batch": 8}) is None
    for args in ({"url": "http://a/b", "batch": 0}, {"url": "b"}):
        assert reward_fault(HttpBatchReward, NAME, args)
