"""Rewards of turns, from plays and environments to trajectories."""

import asyncio
import pickle

import numpy as np
import pytest

from ptf.data.trajectory import NoResult, Reward
from ptf.errors import UserError
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import with_turns
from tests.rl.test_episodes import Scripted, episodes, played
from tests.rl.test_episodes import environments as environments  # a fixture
from tests.rl.test_episodes import tokenizer as tokenizer  # a fixture


def test_an_environments_rewards_stay_at_their_turns(tokenizer, environments):
    for turns in (8, 2):  # it ends by itself after three, or at the limit
        for t in played([{}] * 3, tokenizer, environments, turns=turns):
            assert t.turn_rewards is not None
            assert t.turn_rewards.tolist() == [0.25] * len(t.generations)
            assert t.turn_rewards.dtype == np.float64
            assert t.outcome == Reward(0.25 * min(turns, 3))
            assert pickle.loads(pickle.dumps(t)).turn_rewards.tolist() == t.turn_rewards.tolist()
    (failed,) = played([{"at": 2, "fault": "raise"}], tokenizer, environments)
    assert failed.turn_rewards is None


def play_of(**given):
    async def play(prompt, policy):
        await policy.generate([5, 6])
        await policy.generate([5, 7])
        return policy.trajectory(**given)

    return play


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({"turn_rewards": [0.25, 0.5]}, 0.75),
        ({"outcome": 0.75, "turn_rewards": np.array([0.25, 0.5])}, 0.75),
        ({"outcome": 0.75}, 0.75),
        ({"turn_rewards": [0.25]}, "2 calls of the episode are trained"),
        ({"outcome": 1.0, "turn_rewards": [0.25, 0.5]}, "turn_rewards add up to 0.75"),
        ({"turn_rewards": [0.25, float("nan")]}, "rewards of the turns are"),
        ({"outcome": "good"}, "of the type str, which is no number"),
        ({"outcome": NoResult("crashed"), "turn_rewards": [0.25, 0.5]}, "crashed"),
    ],
)
def test_a_play_gives_the_rewards_of_its_turns(tokenizer, given, outcome):
    (made,) = episodes([{}], tokenizer, None)
    episode = Episode(made.prompt, made.limits, tokenizer, made.seed_of, play_of(**given))
    (t,) = asyncio.run(run_all(Scripted(tokenizer), [episode]))
    if isinstance(outcome, str):
        assert isinstance(t.outcome, NoResult)
        assert outcome in t.outcome.reason
        assert t.turn_rewards is None
    else:
        assert t.outcome == Reward(outcome)
        assert (t.turn_rewards is None) == ("turn_rewards" not in given)


def test_rewards_that_round_differently_than_their_sum_are_taken():
    rewards = [0.1] * 10
    outcome, of_turns = with_turns(Reward(sum(rewards)), rewards, 10)
    assert (outcome, len(of_turns)) == (Reward(sum(rewards)), 10)
    with pytest.raises(UserError, match="add the rest"):
        with_turns(Reward(sum(rewards) + 1e-4), rewards, 10)


def test_a_play_that_asks_nothing_has_no_result(tokenizer):
    async def idle(prompt, policy):
        return policy.trajectory(1.0, counts={"looked": 1})

    (made,) = episodes([{}], tokenizer, None)
    (t,) = asyncio.run(run_all(Scripted(tokenizer), [Episode(made.prompt, made.limits, tokenizer, made.seed_of, idle)]))
    assert t.outcome == NoResult("the rollout function received no response from the policy")
    assert t.counts == {"looked": 1}
