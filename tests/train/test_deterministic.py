"""train.deterministic: the same bits for any split into passes, any number of workers,
and any change of that number on the way."""

from pathlib import Path
from typing import Any

import pytest

from ptf.errors import UserError
from ptf.train import deterministic
from tests.tiny import arithmetic
from tests.train.test_loop import facts, same, train, weights


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    raw = arithmetic(tmp_path)
    raw["train"] |= {"deterministic": True}
    raw["checkpoint"] = {"every": 3, "keep": 9}
    return raw


@pytest.mark.long
def test_how_sequences_are_split_into_passes_changes_no_bit(raw: dict[str, Any]) -> None:
    runs = [train(raw, f"split-{n}", train__micro_batch_sequences=n) for n in (1, 2, 4)]
    assert all(facts(run) == facts(runs[0]) and same(weights(run), weights(runs[0])) for run in runs)


def test_without_it_some_bits_change(raw: dict[str, Any]) -> None:
    """Negative control."""
    runs = [train(raw, f"fast-{n}", train__micro_batch_sequences=n, train__deterministic=False) for n in (1, 4)]
    assert not same(*map(weights, runs))


def test_it_trains_what_the_fast_mode_trains(raw: dict[str, Any]) -> None:
    slow, fast = facts(train(raw, "slow")), facts(train(raw, "fast", train__deterministic=False))
    for a, b in zip(slow, fast, strict=True):
        assert a.keys() == b.keys()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def go_on(raw: dict[str, Any], directory: Path, workers: int, done: int) -> None:
    """Make the rest of a run again, from its checkpoint of step `done`."""
    for checkpoint in (directory / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > done:
            (checkpoint / "manifest.json").unlink()
    train(
        {**raw, "compute": raw["compute"] | {"workers": workers, "launcher": "local" if workers == 1 else "torchrun"}},
        directory.name,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("chain", [((2, 3), (1, 9)), pytest.param(((2, 3), (4, 6), (1, 9)), marks=pytest.mark.cluster)])
def test_any_number_of_workers_one_after_the_other_gives_the_same_bits(
    raw: dict[str, Any], chain: tuple[tuple[int, int], ...]
) -> None:
    """1 → 2 (→ 4) → 1 workers, each continuing from a checkpoint of the one before,
    against one worker from beginning to end."""
    whole = train(raw, "whole")
    directory = train(raw, "elastic")
    for workers, done in chain:
        go_on(raw, directory, workers, done)
        assert facts(directory) == facts(whole)
        assert same(weights(directory), weights(whole))


@pytest.mark.cluster
def test_in_the_fast_mode_another_number_of_workers_changes_nothing_but_rounding(raw: dict[str, Any]) -> None:
    """One worker that goes on as two, with a sharded model, and as one again."""
    raw["train"]["deterministic"] = False
    whole = facts(train(raw, "whole"))
    directory = train(raw, "elastic")
    for workers, done in ((2, 3), (1, 9)):
        go_on(raw, directory, workers, done)
    assert [row["loss"] for row in facts(directory)] == pytest.approx([row["loss"] for row in whole], rel=1e-5)
    assert [row["tokens"] for row in facts(directory)] == [row["tokens"] for row in whole]


def test_large_models_are_refused(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "MAX_GRADIENT_BYTES", 1000)
    with pytest.raises(UserError, match=r"train\.deterministic keeps a gradient for each sequence"):
        train(raw, "a")


@pytest.mark.parametrize(("section", "change"), [("train", {"precision": "bf16"}), ("compute", {"device": "auto"})])
def test_what_it_cannot_promise_is_refused(raw: dict[str, Any], section: str, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"train\.deterministic\s+needs"):
        train({**raw, section: raw[section] | change}, "a")
