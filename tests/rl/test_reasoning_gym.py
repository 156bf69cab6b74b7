"""Rows and scores of reasoning-gym's tasks."""

import contextlib

import pytest

from ptf.config import Plugin
from ptf.data.trajectory import Reward
from ptf.errors import UserError
from ptf.rl.rewards.scoring import RewardWorkers
from tests.tiny import read_jsonl

pytest.importorskip("reasoning_gym", reason="needs pip install 'ptf[reasoning-gym]'")

from ptf.rl.environments.reasoning_gym import UNSANDBOXED, prepare, score

TASKS = {
    "chain_sum": {"level": 1},
    "leg_counting": None,
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2},
    "decimal_arithmetic": {"max_num_decimal_places": 3},
    "time_intervals": {},
    "spell_backward": {},
    "maze": {},
}


def made(directory, tasks, **args):
    prepare(str(directory), tasks=tasks, **{"train": 20, "test": 5, **args})
    return {
        name: [row for task in tasks for row in read_jsonl(directory / name / f"{task}.jsonl")]
        for name in ("train", "test")
    }


def test_the_library_s_answers_have_the_score_1_and_those_to_other_questions_less(tmp_path) -> None:
    found = made(tmp_path, TASKS)["train"]
    assert len(found) == 20 * len(TASKS)
    assert {score(row, f"So it is <answer>0</answer>, no, <answer>{row['answer']}</answer>.") for row in found} == {1.0}
    assert {score(row, row["answer"], tag=None) for row in found} == {1.0}
    assert {score(row, row["answer"]) for row in found} == {0.0}  # without the tags
    for task in TASKS:
        own = [row for row in found if row["task"] == task]
        others = [score(row, other["answer"], tag=None) for row, other in zip(own, [*own[1:], own[0]], strict=True)]
        assert sum(others) / len(others) < 0.7


def test_rows_depend_on_the_seed_alone_and_held_out_questions_are_others(tmp_path) -> None:
    tasks = {"leg_counting": {}, "chain_sum": {"level": 0}}
    first = made(tmp_path / "a", tasks)
    assert made(tmp_path / "b", tasks) == first
    assert made(tmp_path / "c", tasks, train=30)["test"] == first["test"]
    assert made(tmp_path / "d", tasks, seed=1) != first  # negative control
    questions = [row["question"] for name in ("train", "test") for row in first[name]]
    assert len(questions) == len(set(questions))


def test_a_higher_level_makes_harder_questions(tmp_path) -> None:
    def length(level):
        found = made(tmp_path / str(level), {"chain_sum": {"level": level}}, system=None)["train"]
        return sum(len(row["messages"][0]["content"]) for row in found)

    assert length(0) < length(4)


def test_the_prompt_asks_for_the_answer_where_the_score_reads_it(tmp_path) -> None:
    for name, system in (("a", "default"), ("b", "Answer between <answer> and </answer>."), ("c", None)):
        (row, *_) = made(tmp_path / name, {"leg_counting": {}}, system=system)["train"]
        assert row["messages"][-1] == {"role": "user", "content": row["question"]}
        assert [message["role"] for message in row["messages"]] == (["system", "user"] if system else ["user"])
        assert system is None or "<answer>" in row["messages"][0]["content"]


def test_scores_are_computed_by_the_worker_processes(tmp_path) -> None:
    found = made(tmp_path, {"chain_sum": {"level": 0}})["test"]
    score = Plugin(use="ptf.rl.environments.reasoning_gym:score", args={"tag": None})
    with contextlib.closing(RewardWorkers(score, timeout_s=60.0, retries=0)) as workers:
        right = workers.score([(row, row["answer"]) for row in found])
        wrong = workers.score([(row, "x") for row in found])
    assert right == [Reward(1.0)] * 5
    assert all(isinstance(outcome, Reward) and outcome.value < 0.1 for outcome in wrong)


def test_tasks_that_run_answers_as_code_are_refused_until_they_are_allowed(tmp_path) -> None:
    file = tmp_path / "written"
    code = f"__import__('pathlib').Path({str(file)!r}).touch()"
    for task in UNSANDBOXED:
        with pytest.raises(UserError, match=f"{task} by running them as Python"):
            made(tmp_path, {task: {}})
        row, *_ = made(tmp_path, {task: {}}, train=1, test=1, allow_unsandboxed_eval=True)["train"]
        for answer in (code, f"[{code}]", f"[[{code}]]", f"{row['answer']} + {code}"):
            with contextlib.suppress(Exception):
                score(row, answer, tag=None)
        assert file.exists(), task  # the list is not too long
        file.unlink()
    for task in TASKS:
        row, *_ = made(tmp_path, {task: TASKS[task]}, train=1, test=1)["train"]
        with contextlib.suppress(Exception):
            score(row, code, tag=None)
    assert not file.exists()


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"chain_sums": {}}, "no task 'chain_sums'"),
        ({"chain_sum": {"terms": 2}}, "does not take the options"),
        ({"chain_sum": {"min_terms": 0}}, "does not take the options"),
        ({"acre": {"level": 1}}, "has no levels"),
        ({"chain_sum": {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}}, "different questions"),
        ({"rearc": {}}, "read from JSON"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, tasks, words) -> None:
    with pytest.raises(UserError, match=words):
        made(tmp_path, tasks, train=1000)
