"""A reward that fails is no reward of 0."""

import contextlib
import os
import signal
import struct
import sys

import pytest

from ptf.config import ConfigError, Plugin
from ptf.data.trajectory import NoResult, Reward
from ptf.rl.rewards.declarations import one_by_one
from ptf.rl.rewards.functions import exact, numeric
from ptf.rl.rewards.scoring import RewardWorkers
from tests.rl.rewards.shapes import fault


def fickle(row, text):
    """What a reward can do wrong, by the text it is given."""
    fault(text)
    if text == "fork":
        os.fork()  # and both come back from here
    if text in ("noise", "half"):  # on the pipe that it answers through: what nobody can read, and a part of an answer
        os.write(int(sys.argv[1]), struct.pack("!i", 5 if text == "noise" else 100) + b"noise")
    if text == "half":
        os.kill(os.getpid(), signal.SIGSTOP)
    if text == "print":
        print("rewards print things")
    return {"nan": float("nan"), "text": "0.5", "none": None}.get(text, 1.0)


@one_by_one
def fickle_one_by_one(row, text):
    return fickle(row, text)


class Judge:
    """A reward that is an object, and whose calls are coroutines."""

    async def __call__(self, row, text):
        return 0.25


judge = Judge()


def marked(row, text):
    """A function that says itself that it returns coroutines."""
    return judge(row, text)


marked.is_coroutine = True


@pytest.fixture(params=["fickle", "fickle_one_by_one"])
def rewards(request):
    made = RewardWorkers(Plugin(use=f"tests.rl.rewards.test_functions:{request.param}"), timeout_s=1.0, retries=0)
    yield made
    made.close()


@pytest.mark.long
def test_every_failure_is_named_and_the_others_are_scored(rewards):
    texts = ["ok", "raise", "nan", "hang", "ok", "die", "none", "print", "text"]
    outcomes = rewards.score([({}, t) for t in texts])
    found = dict(zip(texts, outcomes, strict=True))
    assert found["ok"] == found["print"] == Reward(1.0)
    assert found["text"] == NoResult("the reward is '0.5', a text and not a number")
    assert found["raise"] == NoResult("KeyError: 'gold'")
    assert "nan" in found["nan"].reason
    assert "longer than 1 s" in found["hang"].reason
    assert "died" in found["die"].reason
    assert isinstance(found["none"], NoResult)
    assert outcomes[4] == Reward(1.0)
    pid = rewards.workers[0].process.pid
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.long
@pytest.mark.parametrize(("text", "said"), [("noise", "its reply cannot be read"), ("half", "longer than 1 s")])
def test_answers_that_are_none_end_their_process_alone(rewards, text, said):
    """Neither they nor what comes after them is taken for another's reward, and none is waited for without end."""
    outcomes = rewards.score([({}, t) for t in ["ok", text, "raise", "ok", "raise"]])
    named = [outcome.reason for outcome in outcomes if isinstance(outcome, NoResult) and "gold" not in outcome.reason]
    assert len(named) == 1
    assert said in named[0]
    for asked, outcome in zip(["ok", text, "raise", "ok", "raise"], outcomes, strict=True):
        assert isinstance(outcome, NoResult) or (outcome == Reward(1.0) and asked != "raise")
    assert rewards.score([({}, "ok")]) == [Reward(1.0)]


def test_of_two_processes_that_answer_after_a_fork_no_answer_is_taken_for_anothers(rewards, capsys):
    """Whichever is quicker: an answer that comes late is seen by its number, here or at a later question."""
    asked, found = ["ok", "fork", "raise", "ok", "raise"], list[Reward | NoResult]()
    found += rewards.score([({}, t) for t in asked])
    # a thread that forks has no event loop in the other process, which therefore answers nothing
    while rewards.reward.use.endswith("one_by_one") and "does it fork?" not in capsys.readouterr().out:
        assert len(asked) < 1000, "no answer came twice"
        asked.append("ok")
        found += rewards.score([({}, "ok")])
    for text, outcome in zip(asked, found, strict=True):
        assert outcome == (NoResult("KeyError: 'gold'") if text == "raise" else Reward(1.0))
    assert rewards.score([({}, "ok")]) == [Reward(1.0)]


@pytest.mark.parametrize("name", ["judge", "marked"])
def test_calls_that_are_coroutines_are_awaited(name):
    plugin = Plugin(use=f"tests.rl.rewards.test_functions:{name}")
    with contextlib.closing(RewardWorkers(plugin, timeout_s=30.0)) as made:
        assert made.score([({}, "ok"), ({}, "so")]) == [Reward(0.25)] * 2


@pytest.mark.long
def test_the_first_fault_is_said_when_it_happens_and_not_after_the_step(capsys):
    workers = RewardWorkers(Plugin(use="tests.rl.rewards.test_functions:fickle"), timeout_s=1.0)
    with contextlib.closing(workers) as made:
        made.score([({}, "raise"), ({}, "hang"), ({}, "ok")])
        assert capsys.readouterr().out.count("KeyError: 'gold'") == 1
        made.score([({}, "hang"), ({}, "ok")])
        assert "longer than 1 s" in capsys.readouterr().out
        made.score([({}, "ok")])
        assert capsys.readouterr().out == ""


def test_a_process_that_died_between_two_batches_is_replaced(rewards):
    assert rewards.score([({}, "ok")]) == [Reward(1.0)]
    process = rewards.workers[0].process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    assert rewards.score([({}, "ok"), ({}, "die"), ({}, "ok")]) == [
        Reward(1.0),
        NoResult("the reward's process died"),
        Reward(1.0),
    ]


def test_a_process_that_stops_listening_is_replaced(rewards):
    """Between two batches, of which the second does not fit into the pipe; no answer is blamed for it."""
    assert rewards.score([({}, "ok")]) == [Reward(1.0)]
    stopped = rewards.workers[0].process.pid
    os.kill(stopped, signal.SIGSTOP)
    assert rewards.score([({}, "a" * 5_000_000), ({}, "ok")]) == [Reward(1.0), Reward(1.0)]
    assert rewards.workers[0].process.pid != stopped


def test_what_failed_for_once_is_asked_again_and_what_is_left_at_the_end_is_not_asked():
    workers = RewardWorkers(Plugin(use="tests.rl.rewards.test_functions:fickle"), timeout_s=1.0, processes=2)
    with contextlib.closing(workers) as made:
        assert made.score([({}, "raise"), ({}, "ok")]) == [NoResult("KeyError: 'gold'"), Reward(1.0)]
        assert made.retried == 1
        assert made.score([({}, "raise")] * 3) == [NoResult("KeyError: 'gold'")] * 3  # also where all fail
        assert made.retried == 4
        made.within_s = 0.5
        found = made.score([({}, "hang")] * 6)
        assert all(isinstance(outcome, NoResult) for outcome in found)
        assert sum("it was not scored" in outcome.reason for outcome in found) == 6


def test_a_reward_that_does_not_exist_is_refused_at_once():
    with pytest.raises(ConfigError, match="fickle"):
        RewardWorkers(Plugin(use="tests.rl.rewards.test_functions:fickel"))


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [("24", " 24 ", 1), ("0.5", "0.50", 1), ("1,000", "1000", 1), ("24", "25", 0), ("24", "", 0), ("a", "a", 1)],
)
def test_numeric(answer, text, value):
    assert numeric({"answer": answer}, text) == value


@pytest.mark.parametrize("function", [exact, numeric])
def test_the_expected_answer_is_in_the_column_answer(function):
    assert function({"answer": "4", "other": "5"}, "4") == 1.0
    assert function({"answer": "4", "other": "5"}, "5") == 0.0
    assert function({"answer": "4", "other": "5"}, "5", column="other") == 1.0
