"""A handful of what benchmarks/faults.py does in full: no fault becomes a reward, each is named,
and nothing else changes."""

import pytest

from ptf.data.trajectory import Reward
from ptf.rl.rewards import scoring
from ptf.rl.worker_messages import Fault
from tests.reliability.fallible import CALLS, ENDS, REWARDS, TURNS
from tests.reliability.faults import Trial, Trials, drawn


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    ("trial", "outcome"),
    [
        (Trial("grpo", "reward", "fork", 20, False), "asked again"),
        (Trial("grpo", "reward", "a text", 20, True), "1 answers without a result"),
        (Trial("grpo", "engine", "too few", 2, False), "stopped: RuntimeError"),
    ],
)
def test_a_fault_is_named_and_is_no_reward(trials: Trials, trial: Trial, outcome: str) -> None:
    found = trials.play(trial, f"trial-{trial.fault.split()[-1]}")
    assert found["wrong"] == []
    assert found["outcome"].startswith(outcome)


def test_a_fault_that_becomes_a_reward_is_seen(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, in the fork that is the run."""
    trials.undisturbed(Trial("grpo", "reward", "NaN", 20, True))

    def paid(reply, count: int) -> list[Reward]:
        replies = [reply] * count if isinstance(reply, Fault) else reply
        return [Reward(0.0 if isinstance(one, Fault) else one) for one in replies]

    monkeypatch.setattr(scoring, "outcomes_of", paid)
    wrong = trials.play(Trial("grpo", "reward", "NaN", 20, True), "zero")["wrong"]
    assert any("the reward 0.0 in place of" in line for line in wrong)


def test_trials_are_of_every_fault() -> None:
    seen = {(trial.place, trial.fault) for trial in map(drawn, range(62))}
    assert len(seen) == 2 * len(ENDS) + 2 * len(REWARDS) + len(TURNS) + len(CALLS)
