"""Weighted sums of rewards."""

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from ptf.config import Plugin
from ptf.data.trajectory import Reward
from ptf.errors import UserError
from ptf.rl.rewards.calls import EpisodeView
from ptf.rl.rewards.scoring import RewardWorkers
from ptf.rl.rewards.weighted_sum import WeightedSum
from tests.rl.rewards.loopback import Reply, serving
from tests.rl.rewards.test_scoring import HERE, group, score_with

EXACT = {"use": "ptf.rl.rewards:exact", "weight": 2.0}
BREVITY = {"use": "ptf.rl.rewards:brevity", "args": {"longest": 10, "margin": 5}}


def test_sums_of_rewards() -> None:
    weighted = WeightedSum(parts=[EXACT, BREVITY])
    assert not weighted.is_coroutine
    assert weighted.max_concurrent_calls == 1, "as its parts"
    assert weighted({"answer": "12345"}, "12345") == 2.0
    assert weighted({"answer": "1234567"}, "1234567") == pytest.approx(2.0 - 0.4)
    with pytest.raises(KeyError):
        weighted({}, "1")


def test_a_part_sees_the_episode_and_the_others_do_not() -> None:
    parts = [EXACT, {"use": f"{HERE}:cut_off", "weight": -1.0}, {"use": f"{HERE}:has_episode", "weight": 100.0}]
    plugin = Plugin(use="ptf.rl.rewards:weighted", args={"parts": parts})
    with contextlib.closing(RewardWorkers(plugin, timeout_s=20.0, retries=0)) as rewards:
        (found,) = score_with(rewards, [group("?", ["a", "a…", "b"], answer="a")])
        assert [t.outcome for t in found] == [Reward(2.0), Reward(-1.0), Reward(0.0)]
    assert not WeightedSum.sees_episodes(parts=[EXACT, parts[2]])


def test_calls_of_a_part_that_must_not_overlap_do_not_beside_others() -> None:
    """They run in the main thread; those of a plain part run in threads, 32 at once, and keep no coroutine waiting."""
    parts = [{"use": f"{HERE}:in_the_main_thread"}, {"use": "tests.rl.overlapping:waits"}]
    parts.append({"use": "tests.rl.overlapping:together", "weight": 0.5})
    plugin = Plugin(use="ptf.rl.rewards:weighted", args={"parts": parts})
    with contextlib.closing(RewardWorkers(plugin, timeout_s=40.0, retries=0)) as rewards:
        assert rewards.score([({}, "")] * 32) == [Reward(2.5)] * 32
    assert WeightedSum(parts=parts[:1]).max_concurrent_calls == 1
    assert WeightedSum(parts=parts[1:]).max_concurrent_calls == 64


def test_an_object_and_a_server_are_parts() -> None:
    with serving(lambda _, body: Reply({"reward": len(body["text"])})) as server:
        parts = [
            {"use": f"{HERE}:Counts", "args": {"start": 10}},
            {"use": "ptf.rl.rewards:http", "args": {"url": server.url, "send_episode": True}, "weight": 100},
        ]
        plugin = Plugin(use="ptf.rl.rewards:weighted", args={"parts": parts})
        with contextlib.closing(RewardWorkers(plugin, timeout_s=20.0, retries=0)) as rewards:
            (found,) = score_with(rewards, [group("?", ["", "a", "bb"])])
    assert sorted(t.outcome.value for t in found) == [11.0, 112.0, 213.0]  # type: ignore[union-attr]
    assert "episode" in server.requests[0][2]


def test_a_part_without_a_result_leaves_none() -> None:
    """Even one that counts nothing."""
    weighted = WeightedSum(parts=weighted_parts("fickle_one_by_one"))
    concurrently = WeightedSum(parts=[*weighted_parts("fickle"), {"use": "tests.rl.overlapping:waits"}])
    assert weighted({"answer": "a"}, "a") == 2.0
    for text, message in (("text", "the reward is '0.5', a text and not a number"), ("nan", "fickle.*: .* nan")):
        for reward in (weighted, concurrently):
            with pytest.raises(ValueError, match=message):
                asyncio.run(called(reward, text))


def weighted_parts(name: str) -> list[dict[str, Any]]:
    return [EXACT, {"use": f"tests.rl.rewards.test_functions:{name}", "weight": 0.0}]


async def called(reward: WeightedSum, text: str) -> float:
    value: Any = reward({"answer": "a"}, text)
    return await value if reward.is_coroutine else value


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "must be a list of rewards"),
        ("exact", "must be a list of rewards"),
        ([{"use": "ptf.rl.rewards:exact", "wieght": 1}], r"parts\.0: a part is {use, args, weight}"),
        ([EXACT, EXACT | {"weight": "1"}], r"parts\.1\.weight: it must be a number"),
        ([{"use": f"{HERE}:rank"}], r"parts\.0\.use: .*:rank scores several responses at once"),
        ([EXACT, {"use": f"{HERE}:Sizes"}], r"parts\.1\.use: .*:Sizes scores several responses at once"),
        ([{"use": f"{HERE}:Counts"}], r"parts\.0: .*missing a required argument: 'start'"),
        ([{"use": f"{HERE}:HERE"}], "no 'HERE'"),
        ([{"use": "ptf.rl.rewards:http", "args": {"url": "x"}}], "is no address"),
    ],
)
def test_parts_that_cannot_be_summed_are_refused_by_name(parts: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RewardWorkers(Plugin(use="ptf.rl.rewards:weighted", args={"parts": parts}))


def test_the_episode_is_passed_by_a_direct_call() -> None:
    ids = np.zeros(0, np.int32)
    episode = EpisodeView((), ids, ids, np.zeros(0, np.float32), ids, False, "a")
    assert WeightedSum(parts=[{"use": f"{HERE}:cut_off", "weight": 3}])({}, "", episode=episode) == 3.0
