"""Tasks of reasoning-gym: rows that the library makes from seeds, and its own score as the reward.

`data.prepare: {use: ptf.rl.environments.reasoning_gym:prepare, args: {tasks: {chain_sum: {level: 1}}}}` writes the
rows, and `rollout.reward: {use: ptf.rl.environments.reasoning_gym:score}` scores the responses to them.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ptf.errors import UserError, raise_if_missing
from ptf.rl.rewards.declarations import one_by_one

raise_if_missing("reasoning_gym", "reasoning-gym")

# tasks whose scores evaluate the response as Python, found with responses that are programs (version 0.1.25): text of a
# policy would run in the reward's process, outside of any sandbox
UNSANDBOXED = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
MOST_TRIES = 20  # rows that the library makes for each row that is written


def prepare(
    directory: str,
    *,
    tasks: Mapping[str, Mapping[str, Any] | None],
    train: int = 1000,
    test: int = 100,
    seed: int = 0,
    system: str | None = "default",
    allow_unsandboxed_eval: bool = False,
) -> None:
    """Write `train/TASK.jsonl` and `test/TASK.jsonl` for each task, of which no two rows have the same question.

    `tasks` maps the names of tasks to their options: the library's own, and `level`, from 0, the level of all of the
    task's attributes in the library's curriculum. `system` is a system prompt, or the name of one of the library's; it
    asks for the answer between `<answer>` and `</answer>`, where `score` reads it. Tasks whose scores run responses as
    code need `allow_unsandboxed_eval`.
    """
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if train < 1 or test < 0:
        raise UserError(f"`train` must be at least 1 and `test` at least 0, not {train} and {test}")
    if (refused := sorted(set(tasks).intersection(UNSANDBOXED))) and not allow_unsandboxed_eval:
        raise UserError(
            f"the library scores responses to {', '.join(refused)} by running them as Python, without a sandbox; where "
            "that is acceptable, allow it with `allow_unsandboxed_eval: true`"
        )
    first = [] if system is None else [{"role": "system", "content": SYSTEM_PROMPTS.get(system, system).strip()}]
    for task, options in tasks.items():
        made = rows(task, dict(options or {}), seed, train + test, first)
        for name, size in (("test", test), ("train", train)):  # so that more rows for training change no held-out row
            file = Path(directory) / name / f"{task}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(next(made)) + "\n" for _ in range(size)))


def rows(task: str, options: dict[str, Any], seed: int, size: int, first: list[dict]) -> Iterator[dict[str, Any]]:
    """Yield `size` rows with different questions, after the messages `first`. Raises UserError if there are too few."""
    library = dataset(task, json.dumps(options), seed, MOST_TRIES * size)
    known = set[str]()
    for index in range(MOST_TRIES * size):
        entry = library[index]
        if entry["question"] in known:
            continue
        known.add(entry["question"])
        messages, answer = [*first, {"role": "user", "content": entry["question"]}], entry["answer"]
        row = json.loads(json.dumps({"messages": messages, **entry, "task": task, "options": options}))
        if answer is not None and score(row, answer, tag=None) != library.score_answer(answer, entry):
            raise UserError(f"the task {task} cannot be used: its rows have other scores when they are read from JSON")
        yield row
    raise UserError(f"{task} has only {len(known)} different questions with the options {options}: make fewer rows")


@functools.cache
def dataset(task: str, options: str, seed: int = 0, size: int = 1) -> Any:
    """Return a data set of the library; `options` is JSON. Raises UserError for a task or options that it lacks."""
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset

    if task not in DATASETS:
        raise UserError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
    own, given = json.loads(options), {}
    if (level := own.pop("level", None)) is not None:
        if task not in CURRICULA:
            raise UserError(f"the task {task} has no levels; give the library's options instead of `level`")
        (curriculum := create_curriculum(task)).set_global_level(level)
        given = vars(curriculum.generate_configuration())
    try:
        return create_dataset(task, **{**given, **own, "seed": seed, "size": size})
    except (TypeError, AssertionError) as error:
        raise UserError(f"the task {task} does not take the options {options}: {error}") from error


@one_by_one
def score(row: Mapping[str, Any], text: str, *, tag: str | None = "answer") -> float:
    """Return the library's score of a response, 0 to 1: of what stands between `<answer>` and `</answer>`, the last
    such part of the text, or with `tag: null` of the whole text. A text without the tags has the score 0."""
    from reasoning_gym.utils import extract_answer

    answer = text.strip() if tag is None else extract_answer(text, tag)
    return (
        float(dataset(row["task"], json.dumps(row["options"])).score_answer(answer, row)) if answer is not None else 0.0
    )
