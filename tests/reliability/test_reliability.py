"""A handful of what benchmarks/kills.py does in full: a killed run ends as one that never stopped."""

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.child import run_python
from tests.reliability.exactly_once import audit
from tests.reliability.kills import decided_state
from tests.reliability.remains import in_shared_memory, used_by_others

ROOT = Path(__file__).parents[2]


STEP_8 = ["phase", 8, "after AdamW.step"]
PRECOMPUTED = ["phase", 1, "after _Precomputing.compute"]
UPDATE = ["phase", 4, "after policy.update"]
AHEAD = "DPO, reference found ahead"
PHASES = [  # of GRPO
    UPDATE,
    ["phase", 2, "after rollout.rollout"],
    ["phase", 1, "before GroupScoring.finish"],
    ["phase", 1, "after policy.logprobs"],
    ["phase", 1, "after reference.logprobs"],
    ["phase", 2, "after rollout.load"],
    ["phase", 1, "after policy.save"],
]
TRIALS = [  # recipe, traps, a fault that is planted, and what is then reported
    ("SFT", [["phase", 4, "after storage.finish"], ["phase", 1, "before loop.export"]], None, "^same$"),
    (
        "SFT",
        [["bytes", 200_000]],
        "orphan",
        "^left: process [0-9]+: sleep 600 ;? ?(left: process [0-9]+: sleep 600 )?$",
    ),
    ("SFT", [STEP_8], "place_in_the_data", "metrics differs.*model/model.safetensors differs.*host_00000.pt differs"),
    ("SFT", [STEP_8], "optimizer", "metrics differs.*exp_avg"),
    (AHEAD, [PRECOMPUTED], "half_made", r"^left: precomputed/\.partial-"),
    ("GRPO", PHASES, None, "^same$"),
    (
        "GRPO",
        [UPDATE],
        "place_in_the_prompts",
        "metrics differs.*samples differs.* answers lost; .* answers trained_twice",
    ),
]


WALL = "GRPO, k = 1, episodes, wall"
WALL_TRIALS = [
    (WALL, [["phase", 2, "before policy.update"], ["phase", 9, "after rollout.sample_parts"]], None, "^same$"),
    # what is decided anew stands in the ledger behind what was decided before: its replay differs, or is refused
    (
        WALL,
        [["phase", 2, "before policy.update"]],
        "decisions",
        "answers sampled_otherwise|the ledger is of another run\n \\(its replay",
    ),
]


def tried(trials: list[tuple[str, list[Any], str | None, str]], place: Path) -> list[dict[str, Any]]:
    """Make trials, each of which has to end as it says; return what is kept of them."""
    given = json.dumps([trial[:3] for trial in trials])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SUITE_GRACE_S": "1"}
    done = run_python("-m", "tests.reliability.kills", place, given, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (recipe, traps, fault, outcome), one in zip(trials, found, strict=True):
        assert [kill["reached"] for kill in one["kills"]] == [True] * len(traps), (recipe, fault, one)
        assert re.search(outcome, one["outcome"]), (recipe, fault, one)
    return found


@pytest.mark.e2e
def test_killed_runs_end_as_one_that_never_stopped(tmp_path: Path) -> None:
    """And leave nothing behind; faults that are planted are reported (negative controls)."""
    found = tried(TRIALS, tmp_path)
    assert found[-2]["answers"] == dict.fromkeys(found[-2]["answers"], 0) | {"answers": 96, "sampled_again": 144}


@pytest.mark.e2e
def test_a_killed_run_by_the_wall_clock_is_that_of_its_replay(tmp_path: Path) -> None:
    """A run that decides anew after a kill is reported (negative control)."""
    found = tried(WALL_TRIALS, tmp_path)
    assert all(one["kills"][0]["decided"] > 0 for one in found)
    assert found[0]["answers"]["sampled_again"] == 16


def test_a_semaphore_of_a_living_process_is_not_left_behind() -> None:
    before = in_shared_memory()
    held = multiprocessing.get_context("spawn").Semaphore()
    (name,) = {name for name in in_shared_memory() - before if name.removeprefix("sem.") in held._semlock.name}
    assert used_by_others(name)
    beside = Path("/dev/shm/sem.of-nobody")
    beside.touch()
    try:
        assert not used_by_others(beside.name), "negative control"
    finally:
        beside.unlink()


def test_of_a_checkpoint_what_is_decided_is_compared(tmp_path: Path) -> None:
    def state(**changed: Any) -> Any:
        sampled = {"due": 3, "started": {"context": torch.ones(2), "ids": torch.tensor(changed.get("ids", [5, 6]))}}
        asked = {"due": 4, "started": {"context": torch.ones(changed.get("asked", 1)), "ids": torch.ones(0)}}
        ended = {"due": 5, "ended": changed.get("end", 1.0), "counts": changed.get("counts", False)}
        members = [sampled, asked | {"due": changed.get("due", 4)}, ended]
        torch.save(
            {"prompts": changed.get("prompts", 7), "in_flight": {"groups": [{"members": members}]}}, tmp_path / "c"
        )
        return decided_state(tmp_path / "c")

    assert state() == state(asked=3) == state(end=0.5), "what no slice has taken"
    for changed in ({"ids": [5, 7]}, {"due": 9}, {"counts": True}, {"prompts": 8}):
        assert state(**changed) != state(), changed
    assert state(counts=True) != state(counts=True, end=0.5)


def test_the_ledger_of_answers_counts_what_went_wrong() -> None:
    def attempt(number: int, restored: int, *steps: tuple[int, list[str], list[str]]) -> list[dict[str, Any]]:
        made = [{"attempt": number, "event": "restored", "step": restored}]
        for step, sampled, trained in steps:
            made += [{"attempt": number, "event": "sampled", "step": step, "answers": sampled}]
            made += [{"attempt": number, "event": "trained", "step": step, "answers": trained}] if trained else []
        return made

    def counts(*attempts: list[dict[str, Any]]) -> dict[str, int]:
        return {name: n for name, n in audit([event for one in attempts for event in one], whole, 2).items() if n}

    a, b = ["a", "a", "b"], ["c", "d", "e"]
    whole = attempt(0, 0, (0, a, a), (1, b, b))
    assert counts(whole) == {"answers": 6}
    assert counts(attempt(0, 0, (0, a, a), (1, b, [])), attempt(1, 1, (1, b, b))) == {"answers": 6, "sampled_again": 3}
    assert counts(attempt(0, 0, (0, a, a), (1, b, b)), attempt(1, 0, (0, a, a), (1, b, b))) == {
        "answers": 6,
        "sampled_again": 6,
    }
    assert counts(attempt(0, 0, (0, a, a))) == {"answers": 6, "lost": 3, "not_in_the_history": 3}
    assert counts(attempt(0, 0, (0, a, a), (1, b, ["c", "d", "d"]))) == {"answers": 6, "lost": 1, "trained_twice": 1}
    assert counts(attempt(0, 0, (0, a, a), (1, b, [])), attempt(1, 1, (1, b, [*b, "c"])))["trained_twice"] == 1
    other = ["c", "d", "x"]
    assert counts(attempt(0, 0, (0, a, a), (1, other, [])), attempt(1, 1, (1, b, b))) == {
        "answers": 6,
        "sampled_again": 3,
        "sampled_otherwise": 1,
    }


@pytest.mark.cluster  # and `make resumes`, a hundred times
def test_of_two_resumes_at_once_one_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The other says who holds the run; where that one is killed too, the next goes on at once."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "tests.reliability.resumes", tmp_path, "disk", 3, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["wrong"] for one in found] == [[], [], []]
    assert sum(one["refused"] for one in found) >= 1
