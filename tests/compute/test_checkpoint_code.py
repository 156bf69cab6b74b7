"""A checkpoint is data: whatever its files hold, reading them runs nothing of theirs and stays in their directory."""

import copy
import io
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ptf import storage
from ptf.compute import checkpoint
from ptf.compute.dcp_files import NAMES
from ptf.compute.world import World, joined
from ptf.errors import UserError


class Runs:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined("cpu", 60) as world:
        yield world


def trained(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def place(tmp_path: Path, world: World) -> Path:
    """Model 0's tensors."""
    checkpoint.write(str(tmp_path / "step"), checkpoint.tensors_of(*trained(0)), {}, world)
    return tmp_path / "step"


def loaded(place: Path, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(1)
    checkpoint.load_tensors(str(place), model, optimizer, world)
    return model, optimizer


def rewritten(place: Path, change) -> None:
    file = place / "tensors" / ".metadata"
    index = pickle.loads(file.read_bytes())
    changed = change(index)
    file.write_bytes(pickle.dumps(index if changed is None else changed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_control_what_was_written_is_read(tmp_path, world, dtype):
    written, moments = trained(0, dtype)
    checkpoint.write(str(tmp_path), checkpoint.tensors_of(written, moments), {}, world)
    model, optimizer = trained(1, dtype)
    checkpoint.load_tensors(str(tmp_path), model, optimizer, world)
    assert torch.equal(model.weight, written.weight)
    for ours, theirs in zip(optimizer.state.values(), moments.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq", "step"))


def test_nothing_but_tensors_is_written(place):
    def look(index) -> None:
        assert not [
            name for name, entry in index.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)
        ]
        assert "optimizer.state.weight.exp_avg" in index.state_dict_metadata

    rewritten(place, look)
    # classes of DCP, shapes and dtypes: nothing that could be called with arguments of the file's
    assert len(NAMES) == 20


@pytest.mark.parametrize(
    "hidden", [lambda mark, index: Runs(mark), lambda mark, index: index.planner_data.update(x=Runs(mark))]
)
def test_an_index_that_runs_code_is_refused_and_runs_none(place, world, hidden):
    mark = place.parent / "ran"
    rewritten(place, lambda index: hidden(mark, index))
    with pytest.raises(storage.Corrupt, match=r"it names posix\.mkdir"):
        loaded(place, world)
    assert not mark.exists()
    pickle.loads((place / "tensors" / ".metadata").read_bytes())
    assert mark.exists()  # the control: it would have


def test_a_name_that_hides_behind_an_allowed_module_is_refused(place, world):
    (place / "tensors" / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x10serialization.io\x93.")
    with pytest.raises(storage.Corrupt, match="it names"):
        loaded(place, world)


OUTSIDE = ("../x.distcp", "/etc/passwd", "a/__0_0.distcp", "__0_0.distcp/../../x", 3)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        *[("relative_path", path, "not of this checkpoint") for path in OUTSIDE],
        ("transform_descriptors", ["stream.zstd"], "needs transformations"),
    ],
)
def test_an_entry_outside_of_the_directory_or_with_a_transformation_is_refused(place, world, field, value, said):
    shutil.copy(place / "tensors" / "__0_0.distcp", place / "x.distcp")

    def change(index) -> None:
        for where in index.storage_data.values():
            setattr(where, field, value)

    rewritten(place, change)
    with pytest.raises(storage.Corrupt, match=said):
        loaded(place, world)


def test_an_entry_that_is_no_tensor_is_refused(place, world):
    mark, file = place.parent / "ran", place / "tensors" / "__0_0.distcp"
    evil = io.BytesIO()
    torch.save(Runs(mark), evil)
    start = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(evil.getvalue())

    def add(index) -> None:
        where = copy.copy(next(iter(index.storage_data.values())))
        where.offset, where.length = start, len(evil.getvalue())
        index.storage_data[MetadataIndex("optimizer.param_groups.0.lr")] = where
        index.state_dict_metadata["optimizer.param_groups.0.lr"] = BytesStorageMetadata()

    rewritten(place, add)
    with pytest.raises(storage.Corrupt, match=r"it names .*BytesStorageMetadata, which no index of tensors needs"):
        loaded(place, world)
    assert not mark.exists()


def test_a_component_that_keeps_other_things_than_tensors_is_refused_by_name():
    class Keeps(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None: ...

    model = nn.Sequential(Keeps(2, 2))
    with pytest.raises(UserError, match=r"0\._extra_state is not a tensor"):
        checkpoint.tensors_of(model, torch.optim.AdamW(model.parameters()))
