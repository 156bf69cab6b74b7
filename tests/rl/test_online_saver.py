"""Checkpoints of online runs are written beside training, and committed only when every role's part is whole."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ptf.compute import saver
from ptf.rl.cluster import LocalRoleGroup
from ptf.rl.online_saver import OnlineSaver, Unfinished
from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_controller import train
from tests.rl.test_pools import left


def manifests(run: Path) -> list[str]:
    """Return the names of the committed checkpoints."""
    return sorted(file.parent.name for file in (run / "checkpoints").glob("*/manifest.json"))


def watch_updates(monkeypatch: pytest.MonkeyPatch, noting: Any) -> None:
    """Call `noting` with the step before each update of the policy."""
    call = LocalRoleGroup.call

    def watched(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method == "update":
            noting(args[1])
        return call(self, method, *args, **options)

    monkeypatch.setattr(LocalRoleGroup, "call", watched)


@pytest.mark.parametrize("recipe", ["grpo", pytest.param("ppo", marks=pytest.mark.long)])
def test_training_goes_on_while_a_checkpoint_is_written(raw, monkeypatch, recipe):
    """The parts of step 2 are written only once step 4 is updated; what they hold is the state of step 2."""
    raw["recipe"] = recipe
    raw["track"] = {"samples_every": 1, "tensorboard": False}
    raw["checkpoint"] = {"every": 2, "keep": 9}
    whole, write, updated, seen = train(raw, "whole"), saver.write, threading.Event(), list[list[str]]()
    run = whole.with_name("slow")

    def late(directory: str, *args: Any) -> Any:
        assert updated.wait(60)
        return write(directory, *args)

    def noting(step: int) -> None:
        if step == 3:
            seen.append(manifests(run))
            updated.set()

    monkeypatch.setattr(saver, "write", late)
    watch_updates(monkeypatch, noting)
    assert left(train(raw, "slow")) == left(whole)
    assert seen
    assert not any(seen)  # no checkpoint was there when step 4 was updated
    monkeypatch.undo()
    assert manifests(run) == [f"step_{step:08}" for step in (2, 4, 6)]
    for step in (4, 6):
        (run / "checkpoints" / f"step_{step:08}" / "manifest.json").unlink()
    assert left(train(raw, "slow")) == left(whole)  # from step 2


def test_a_part_that_cannot_be_written_ends_the_run_and_leaves_the_checkpoint_before(raw, monkeypatch):
    write, updates = saver.write, list[int]()

    def full(directory: str, *args: Any) -> Any:
        if directory.endswith("step_00000004"):
            raise RuntimeError("rank 0: OSError: the store is gone")
        return write(directory, *args)

    monkeypatch.setattr(saver, "write", full)
    watch_updates(monkeypatch, updates.append)
    with pytest.raises(RuntimeError, match="the store is gone"):
        train(raw, "a")
    assert updates[-1] <= 4  # at the latest in the step after
    monkeypatch.undo()
    run = Path(raw["output"]) / "a"
    assert manifests(run) == ["step_00000002"]
    assert left(train(raw, "a")) == left(train(raw, "whole"))


def test_a_checkpoint_that_is_written_while_training_fails_is_kept(raw, monkeypatch):
    write = saver.write

    def slow(directory: str, *args: Any) -> Any:
        time.sleep(0.5)
        return write(directory, *args)

    def failing(step: int) -> None:
        if step == 2:
            raise ArithmeticError("the update of step 3")

    monkeypatch.setattr(saver, "write", slow)
    monkeypatch.setattr(OnlineSaver, "commit_if_written", _only_at_the_end)
    watch_updates(monkeypatch, failing)
    with pytest.raises(ArithmeticError, match="step 3"):
        train(raw, "a")
    assert manifests(Path(raw["output"]) / "a") == ["step_00000002"]


def _only_at_the_end(self: OnlineSaver, wait_s: float = 0.0) -> bool:
    return COMMIT(self, wait_s) if wait_s else self.unfinished is None


COMMIT = OnlineSaver.commit_if_written


def test_a_part_that_is_never_written_is_waited_for_no_longer_than_the_limit():
    class Hanging:
        def call(self, method: str, *args: Any) -> None:
            assert method == "saved"

    of = OnlineSaver(None, None, {"": Hanging()}, 0.25)  # pyright: ignore[reportArgumentType]
    of.unfinished = saving = Unfinished(7, {}, {}, {"": 1})
    with pytest.raises(TimeoutError, match=r"the checkpoint of step 7 was not written within 0\.25 s"):
        of.wait()
    assert of.unfinished is saving
