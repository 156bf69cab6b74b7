"""Rewards and environments of a job with several sources."""

from contextlib import closing

import numpy as np
import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import ConfigError, Plugin, loads
from ptf.data.trajectory import NoResult, Prompt, Reward, Trajectory
from ptf.rl.environments.protocol import StepResult
from ptf.rl.rewards.scoring import GroupScoring, Rewards, RewardWorkers, score_groups
from ptf.run import run
from tests.rl.test_controller import raw as raw  # a fixture


def longer(row, text):
    return float(len(text))


def always(row, text, *, value=1.0):
    if value < 0:
        raise ValueError("negative")
    return value


class TwoTurns:
    """Pays 1 for every answer."""

    def __init__(self, row, seed):
        self.row, self.turns = row, 0

    def reset(self):
        return self.row["messages"]

    def step(self, text):
        self.turns += 1
        return StepResult([{"role": "user", "content": "1"}], reward=1.0, done=self.turns == 2)


def group(source, texts, outcome=None):
    prompt = Prompt(np.array([1], np.int32), {}, source, 0)
    return tuple(Trajectory(prompt, (), text, outcome) for text in texts)


@pytest.mark.long
def test_each_source_has_its_reward_and_its_factor():
    plugins = {"a": ("longer", {}, 2.0), "b": ("always", {"value": 3.0}, 1.0), "c": ("always", {"value": -1.0}, 5.0)}
    made = {
        name: (RewardWorkers(Plugin(use=f"{__name__}:{use}", args=args), 5, retries=0), weight)
        for name, (use, args, weight) in plugins.items()
    }
    groups = [group("a", ["x", "xx"]), group("b", ["x"]), group("c", ["x"]), group("d", ["x"])]
    groups.append(group("a", ["xxx"], Reward(0.5)))
    with closing(Rewards(made)) as rewards:
        found = score_groups(rewards, groups)
    assert [t.outcome for t in found[0]] == [Reward(2.0), Reward(4.0)]
    assert found[1][0].outcome == Reward(3.0)
    assert isinstance(found[2][0].outcome, NoResult)
    assert found[3][0].outcome is None, "a source without a reward"
    assert found[4][0].outcome == Reward(0.5), "what its play gave"


@pytest.mark.long
def test_a_source_with_an_environment_is_trained_beside_one_with_a_reward(raw, tmp_path):
    path = raw["data"]["sources"]["p"]["path"]
    raw["data"]["sources"] = {name: {"path": path, "kind": "prompt"} for name in ("talk", "sums")}
    raw["rollout"].pop("reward")
    raw["rollout"] |= {
        "environment": {"talk": {"use": f"{__name__}:TwoTurns", "weight": 0.5}},
        "reward": {"sums": {"use": f"{__name__}:always", "args": {"value": 7.0}}},
        "max_turns": 4,
    }
    raw["evaluate"] = {}
    raw["train"] |= {"steps": 2}
    raw["train"].pop("validate_every")
    rows = read_metrics(run(loads(yaml.safe_dump(raw)), "a") / "metrics.jsonl")
    for row in rows:
        assert 0.5 <= row["source_reward/talk"] <= 1.0
        assert row["source_reward/sums"] == 7.0
        assert 1 < row["turns"] < 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": {"q": {"use": f"{__name__}:always"}}}, "no source has this name; there are dev, p"),
        ({"reward": {"p": {"use": f"{__name__}:always"}}}, "neither rollout.reward nor rollout.environment has dev"),
        ({"environment": {"p": {"use": "a:b"}}, "play": {"use": "a:b"}}, "give one, not both"),
    ],
)
def test_sources_without_a_reward_are_refused(raw, change, message):
    raw["rollout"].pop("reward")
    raw["rollout"] |= change
    with pytest.raises(ConfigError, match=message):
        loads(yaml.safe_dump(raw))


@pytest.mark.long
def test_answers_are_scored_while_others_are_generated(raw, monkeypatch):
    """The reward of a group has been called before the last group was there; a replica that is replaced gives a group
    twice, which is scored once."""
    groups = [group("a", ["x", "xx"]), group("b", ["xxx"])]
    with (
        closing(RewardWorkers(Plugin(use=f"{__name__}:longer"), 5)) as workers,
        GroupScoring(Rewards({"": (workers, 1.0)})) as scoring,
    ):
        scoring.add(1, groups[1])
        scoring.add(1, groups[1])
        (early,) = scoring.waiting
        assert early.result(timeout=60) == [3.0], "before the other group is there"
        found = scoring.finish(groups)
    assert [[t.outcome for t in of] for of in found] == [[Reward(1.0), Reward(2.0)], [Reward(3.0)]]
