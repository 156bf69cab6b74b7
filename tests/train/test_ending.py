"""How a run may end, and what it then leaves: early, on request, on numbers that are none, without a place to write."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ptf.compute import provenance, saver
from ptf.compute.tracking import read_metrics
from ptf.errors import Stopped, UserError
from ptf.recipes.sft.recipe import SFT
from ptf.train import loop
from tests.reliability.kills import tensors
from tests.tiny import arithmetic
from tests.train.test_loop import at_step, facts, same, train, weights


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    return arithmetic(tmp_path)


def steps(directory: Path) -> list[int]:
    return [row["step"] for row in read_metrics(directory / "metrics.jsonl")]


def test_sigterm_saves_and_ends_and_the_run_goes_on(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)  # Ray's, where it runs in this process
    whole = train(raw, "whole")
    preempted = at_step(monkeypatch, 7, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with preempted, pytest.raises(Stopped, match="stopped after step 8 of 12"):
        train(raw, "a")
    directory = Path(raw["output"]) / "a"
    assert (directory / "checkpoints" / "step_00000008" / "manifest.json").exists()
    assert not (directory / "model").exists()
    again = train(raw, "a")
    assert steps(again) == list(range(1, 13))
    assert facts(again) == facts(whole)
    assert same(weights(again), weights(whole))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_file_named_stop_ends_a_run_once(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = at_step(monkeypatch, 3, lambda tracker: (Path(tracker.lines.file.name).parent / "stop").touch())
    with asked, pytest.raises(Stopped, match="stopped after step 4 of 12"):
        train(raw, "a")
    assert steps(train(raw, "a"))[-1] == 12


def scaled_loss(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """Replace SFT's loss by one that is NaN in the forward passes of these numbers."""
    loss, calls = SFT.loss, [0]

    def broken(*args: Any) -> tuple:
        value, metrics = loss(*args)
        calls[0] += torch.is_grad_enabled()
        return (value * float("nan") if torch.is_grad_enabled() and calls[0] in bad else value), metrics

    monkeypatch.setattr(SFT, "loss", broken)


def test_the_rows_of_a_loss_that_is_not_finite_are_kept(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_loss(monkeypatch, {6})
    with pytest.raises(UserError, match=r"step 3: .*nan.*The documents of this step are in .*nonfinite/step_00000003"):
        train(raw, "a")
    lines = (Path(raw["output"]) / "a" / "nonfinite" / "step_00000003" / "rank_00000.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    assert documents
    assert all("=" in d["text"] and d["source"] == "sums" and d["tokens"] for d in documents)


def test_a_step_may_be_left_out(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_loss(monkeypatch, {6})
    directory = train(raw, "a", train__on_nonfinite="skip")
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["step"] for row in rows if row.get("nonfinite_step_skipped")] == [3]
    assert "loss" not in rows[2]
    assert all(torch.isfinite(w).all() for w in weights(directory).values())


def test_not_all_steps_may_be_left_out(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_loss(monkeypatch, set(range(5, 100)))
    with pytest.raises(UserError, match="10 times in a row"):
        train(raw, "a", train__on_nonfinite="skip")


def test_a_run_ends_when_the_held_out_loss_no_longer_falls(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 5.0, 5.0])
    monkeypatch.setattr(loop, "held_out_metrics", lambda *args: {"loss/held_out": next(losses)})
    raw["train"] |= {"validate_every": 2, "early_stopping": 2}
    directory = train(raw, "a")
    assert steps(directory) == list(range(1, 9))
    assert "loss/held_out has not improved 2 times in a row" in capsys.readouterr().out
    assert (directory / "checkpoints" / "step_00000008").exists()
    assert (directory / "model").exists()


def test_the_best_checkpoint_is_kept_and_exported(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5, 2.2, 2.1])
    monkeypatch.setattr(loop, "held_out_metrics", lambda *args: {"loss/held_out": next(losses)})
    raw["train"]["validate_every"] = 2
    raw["checkpoint"] = {"every": 2, "keep": 1, "best": "loss/held_out"}
    directory = train(raw, "a")
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["step_00000004", "step_00000012"]
    exported = weights(directory)["model.embed_tokens.weight"].numpy().tobytes()
    for step, equal in ((4, True), (12, False)):
        held = tensors(directory / "checkpoints" / f"step_{step:08}" / "tensors")["model.embed.weight"]
        assert held.startswith(exported) == equal  # behind them lie the rows that fill the vocabulary up


def test_a_place_that_cannot_be_written_leaves_the_checkpoint_before_it(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saver.write

    def full(directory: str, *args: Any) -> Any:
        if directory.endswith("step_00000010"):
            raise OSError(28, "No space left on device")
        return write(directory, *args)

    monkeypatch.setattr(saver, "write", full)
    with pytest.raises(
        UserError,
        match=r"the checkpoint of step 10 could not be written to .*no space is left on the disk at "
        r".*the one before it is whole",
    ):
        train(raw, "a")
    monkeypatch.undo()
    again = train(raw, "a")
    assert same(weights(again), weights(train(raw, "whole")))


@pytest.mark.long
def test_saving_goes_on_beside_training(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the state of the step it belongs to, however long the writing takes;
    and steps are made meanwhile."""
    whole = train(raw, "whole")
    write, at_write = saver.write, []

    def slow(directory: str, *args: Any) -> Any:
        time.sleep(1.0)
        at_write.append((directory[-8:], len(steps(Path(raw["output"]) / "slow"))))
        return write(directory, *args)

    monkeypatch.setattr(saver, "write", slow)
    train(raw, "slow")
    assert at_write[0][1] > 5  # rows of metrics when step 5's was begun to be written
    monkeypatch.undo()
    for run_name in ("whole", "slow"):  # from the one of step 10 again
        (Path(raw["output"]) / run_name / "checkpoints" / "step_00000012" / "manifest.json").unlink()
        assert same(weights(train(raw, run_name)), weights(whole))


def test_other_code_is_refused_unless_accepted(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(raw, "a")
    monkeypatch.setattr(provenance, "code", lambda: "another")
    with pytest.raises(UserError, match=r"ptf's code was \w+, is another.*checkpoint\.accept_version_changes"):
        train(raw, "a")
    train(raw, "a", checkpoint__accept_version_changes=True)
    assert "continuing, although" in capsys.readouterr().out


def test_checkpoints_may_lie_elsewhere(raw: dict[str, Any], tmp_path: Path) -> None:
    directory = train(raw, "a", checkpoint__to="memory://elsewhere")
    assert not (directory / "checkpoints").exists()
    (directory / "metrics.jsonl").unlink()
    whole = load_file(directory / "model" / "model.safetensors")
    again = train(raw, "a", checkpoint__to="memory://elsewhere")  # it finds that all is done
    assert same(weights(again), whole)
    assert steps(again) == []
