"""Which checkpoints are kept, whatever was killed meanwhile."""

import uuid
from pathlib import Path

import pytest

from ptf import storage
from ptf.compute.checkpoint import Checkpoints
from ptf.config.sections.checkpoint import CheckpointConfig


def commit(saves: Checkpoints, step: int) -> None:
    place = saves.begin(step)
    with storage.create(f"{place}/tensors/part") as stream:
        stream.write(b"weights")
    saves.commit(step, {"tensors/part": stream.entry}, {"metrics": {"loss": abs(step - 2)}})


@pytest.mark.parametrize("store", ["disk", "objects"])
@pytest.mark.parametrize("best", [None, "loss"])
def test_what_a_killed_commit_did_not_drop_is_dropped_by_the_next_attempt(
    tmp_path: Path, store: str, best: str | None
) -> None:
    root = str(tmp_path) if store == "disk" else f"memory://{uuid.uuid4().hex}"
    killed = Checkpoints(root, CheckpointConfig(every=1, keep=9, best=best), steps=9)
    for step in range(1, 7):
        commit(killed, step)
    storage.remove(f"{root}/step_00000001/{storage.MANIFEST}")  # so far its removal came
    if store == "disk":
        (tmp_path / "step_00000003" / storage.MANIFEST).unlink()
        (tmp_path / "step_00000003" / "tensors" / "part").unlink()  # and here its directories are left
    storage.remove(f"{root}/step_00000006/{storage.MANIFEST}")  # which was not written yet
    again = Checkpoints(root, CheckpointConfig(every=1, keep=2, best=best), steps=9)
    again.prune(5)
    kept = ["step_00000002"] * bool(best) + ["step_00000004", "step_00000005", "step_00000006"]
    assert storage.children(root) == kept
    found = again.latest()
    assert found is not None
    assert found[0] == 5
    commit(again, 6)
    assert storage.children(root) == [*kept[: bool(best)], "step_00000005", "step_00000006"]


def test_a_checkpoint_of_another_step_under_this_name_is_damaged(tmp_path: Path, capsys) -> None:
    saves = Checkpoints(str(tmp_path), CheckpointConfig(every=1, keep=9), steps=9)
    commit(saves, 1)
    commit(saves, 2)
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000003")
    found = saves.latest()
    assert found is not None
    assert found[:2] == (1, str(tmp_path / "step_00000001"))
    assert "step_00000003 is damaged (its manifest is of step 2)" in capsys.readouterr().out
