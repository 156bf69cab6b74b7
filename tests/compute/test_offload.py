"""What a role parks comes back to the bit, in place, and its memory is the system's meanwhile."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from ptf.compute import offload
from ptf.compute.offload import OffloadedTensors, PinnedMemory, own_file, release_freed_memory

MIB = 1 << 20


@pytest.fixture(params=["file", "host memory"])
def offloaded(request, tmp_path, monkeypatch) -> OffloadedTensors:
    monkeypatch.setattr(offload, "SLAB_BYTES", 5 * MIB)  # smaller than all tensors, and none's multiple
    return OffloadedTensors(own_file(str(tmp_path / "offloaded" / "policy"), 3) if request.param == "file" else None)


def test_memory_for_a_gpu_is_page_locked(monkeypatch):
    asked, empty = list[bool](), torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "empty", lambda size, pin_memory, dtype: asked.append(pin_memory) or empty(size, dtype=dtype)
    )
    assert [len(part) for part, _ in PinnedMemory().parts(0, 7)] == [7]
    assert asked == [True]


def resident() -> int:
    return psutil.Process().memory_info().rss


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    model[3].weight = model[1].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1024)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]


@pytest.mark.long
def test_training_goes_on_as_if_nothing_had_been_parked(offloaded):
    (model, optimizer), (other, others) = trained(), trained()
    half = model[0].weight[:512]  # a view
    for _ in range(3):
        offloaded.offload(tensors(model, optimizer))
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors(model, optimizer))
        offloaded.restore()
        step(model, optimizer)
        step(other, others)
    assert all(torch.equal(a, b) for a, b in zip(tensors(model, optimizer), tensors(other, others), strict=True))
    assert torch.equal(half, model[0].weight[:512])
    assert model[3].weight is model[1].weight


@pytest.mark.parametrize("offloaded", ["host memory"], indirect=True)
def test_host_memory_is_allocated_once(offloaded):
    model, optimizer = trained()
    found = []
    for gradients in (False, True, False, True):
        if gradients:
            model(torch.ones(2, 1024)).square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None] if gradients else []
        offloaded.offload([*tensors(model, optimizer), *grads])
        found.append([slab.data_ptr() for slab in offloaded.pinned.slabs])
        assert 5 * MIB * len(found[-1]) < sum(size for _, size in offloaded.waiting) + 5 * MIB or len(found) == 3
        offloaded.restore()
    assert found[1][: len(found[0])] == found[0]  # it grows
    assert found[1] == found[2] == found[3]


def measured_on_disk(file: Path) -> list[int]:
    """Return the bytes of the state, and those resident before it is offloaded, meanwhile, and once it is restored."""
    model, optimizer = trained()
    release_freed_memory()
    offloaded, before = OffloadedTensors(file), resident()
    size = sum(t.nbytes for t in {id(t): t for t in tensors(model, optimizer)}.values())
    offloaded.offload(tensors(model, optimizer))
    assert sum(nbytes for _, nbytes in offloaded.waiting) == size
    meanwhile = resident()
    assert file.stat().st_size == size
    offloaded.restore()
    assert not file.exists()
    return [size, before, meanwhile, resident()]


def test_on_disk_it_takes_no_memory(tmp_path):
    """In a process of its own: in this one, what earlier tests left may be freed meanwhile."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        size, before, meanwhile, after = processes.submit(measured_on_disk, tmp_path / "policy.bin").result(300)
    assert before - meanwhile > 0.95 * size
    assert abs(after - before) < 0.1 * size


def test_what_waits_is_not_parked_again_and_what_is_awake_not_woken(offloaded):
    model, optimizer = trained()
    sums = [float(t.detach().sum()) for t in tensors(model, optimizer)]
    offloaded.restore()
    offloaded.offload(tensors(model, optimizer))
    offloaded.offload(tensors(model, optimizer))
    offloaded.restore()
    offloaded.restore()
    assert [float(t.detach().sum()) for t in tensors(model, optimizer)] == sums


def test_memory_that_is_not_torchs_own_is_refused_before_anything_is_emptied(offloaded):
    values, seen = torch.ones(MIB), torch.ones(MIB)
    array = seen.numpy()
    with pytest.raises(RuntimeError, match=r"1 of 2 tensors have memory .* cannot be freed"):
        offloaded.offload([values, seen])
    assert values.sum() == MIB == array.sum()


def test_a_disk_that_cannot_be_written_leaves_everything_awake(tmp_path):
    (tmp_path / "full").write_text("a file where the directory should be")
    values = torch.ones(MIB)
    with pytest.raises(OSError, match="full"):
        OffloadedTensors(tmp_path / "full" / "0.bin").offload([values])
    assert values.sum() == MIB


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda b: b[:5], "is shorter than what was written"), (lambda b: b[:-1] + b"x", "is not what was written")],
)
def test_a_file_that_was_changed_is_noticed(tmp_path, change, said):
    values, offloaded = torch.ones(MIB), OffloadedTensors(tmp_path / "0.bin")
    offloaded.offload([values])
    (tmp_path / "0.bin").write_bytes(change((tmp_path / "0.bin").read_bytes()))
    with pytest.raises(RuntimeError, match=said):
        offloaded.restore()
