"""Offloading of a role's memory while it waits, so that others can use it.

A tensor's storage is copied away and emptied, and later filled again in place, so that every view, alias and shard of
it, and the optimizer that holds it, stay valid.
"""

import contextlib
import ctypes
import gc
import hashlib
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptf.compute.meter import reset_peak_memory

SLAB_BYTES = 256 << 20  # a power of two: torch rounds up each allocation of page-locked memory to one


class PinnedMemory:
    """Page-locked host memory, from which a GPU copies at the full speed of its link; without a GPU, plain memory. It
    grows by slabs and is never freed, because allocating it takes longer than a copy."""

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []

    def parts(self, first: int, size: int) -> Iterator[tuple[Tensor, int]]:
        """Yield the memory of bytes `first` to `first + size`, in parts, each with its offset from `first`."""
        at = first
        while at < first + size:
            number, start = divmod(at, SLAB_BYTES)
            while len(self.slabs) <= number:
                self.slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            part = self.slabs[number][start : min(SLAB_BYTES, start + first + size - at)]
            yield part, at - first
            at += len(part)


class OffloadedTensors:
    """The offloaded tensors of one role on one worker: in a file, or in host memory if `file` is None. The host memory
    is used again by the next offload."""

    def __init__(self, file: Path | None, pinned: PinnedMemory | None = None, first: int = 0) -> None:
        """With `pinned`, which others use as well, the tensors lie from its byte `first` on."""
        self.file = file
        self.pinned, self.first = pinned or PinnedMemory(), first
        self.digest = b""
        self.waiting: list[tuple[torch.UntypedStorage, int]] = []  # with their sizes in bytes

    def offload(self, tensors: Iterable[Tensor], release: bool = True) -> None:
        """Empty the storages of these tensors, which nothing may read until `restore`; tensors that are offloaded
        already stay so. Without `release`, this process keeps the freed memory for its own next tensors.

        Raises OSError, and changes nothing, if the file cannot be written.
        """
        if self.waiting:
            return
        distinct: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.nbytes():
                distinct[storage.data_ptr()] = storage
        fixed = sum(not storage.resizable() for storage in distinct.values())
        if fixed:
            raise RuntimeError(
                f"{fixed} of {len(distinct)} tensors have memory that torch does not own, or that was shared with "
                "NumPy, so it cannot be freed"
            )
        if self.file is None:
            self._copy(distinct.values(), restoring=False)
        else:
            self.digest = self._write(self.file, distinct.values())
        self.waiting = [(storage, storage.nbytes()) for storage in distinct.values()]
        for storage in distinct.values():
            storage.resize_(0)
        if release:
            release_freed_memory()

    def restore(self) -> None:
        """Fill the storages again. Raises OSError or RuntimeError if the file is not what was written."""
        for storage, size in self.waiting:
            storage.resize_(size)
        storages = [storage for storage, _ in self.waiting]
        if self.file is None:
            self._copy(storages, restoring=True)
        elif storages:
            self._read(self.file, storages)
        self.waiting = []

    def _copy(self, storages: Iterable[torch.UntypedStorage], restoring: bool) -> None:
        """Copy the storages to host memory, one after the other, or back."""
        first = self.first
        for storage in storages:
            values = _bytes(storage)
            for part, offset in self.pinned.parts(first, len(values)):
                inner = values[offset : offset + len(part)]
                _ = inner.copy_(part, non_blocking=True) if restoring else part.copy_(inner, non_blocking=True)
            first += len(values)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _write(self, file: Path, storages: Iterable[torch.UntypedStorage]) -> bytes:
        """Write the storages; return their SHA-256."""
        sha = hashlib.sha256()
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(file, "wb") as out:
                for storage in storages:
                    host = _bytes(storage).cpu()  # a reference must be held while it is read: on a GPU it is a copy
                    out.write(_memory(host))
                    sha.update(_memory(host))
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return sha.digest()

    def _read(self, file: Path, storages: Iterable[torch.UntypedStorage]) -> None:
        """Fill the storages from the file, and remove it."""
        sha = hashlib.sha256()
        with open(file, "rb") as stream:
            for storage in storages:
                values = _bytes(storage)
                host = values if values.device.type == "cpu" else torch.empty(len(values), dtype=torch.uint8)
                if stream.readinto(_memory(host)) != len(values):
                    raise RuntimeError(f"{file} is shorter than what was written to it")
                sha.update(_memory(host))
                if host is not values:
                    values.copy_(host)
        if sha.digest() != self.digest:
            raise RuntimeError(f"{file} is not what was written to it")
        file.unlink()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(values: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU; unlike after `numpy()`, its storage can still be resized."""
    return memoryview((ctypes.c_char * len(values)).from_address(values.data_ptr())).cast("B")


def release_freed_memory() -> None:
    """Return freed memory to the operating system, and GPU memory to the other processes on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # some C libraries lack it, and return memory by their own rules
        ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory()  # the earlier peak was of memory that is now freed


def own_file(directory: str | None, rank: int) -> Path | None:
    """Return a unique file for one role on one worker, in the directory of that role; None without a directory.

    Replicas all have rank 0, and machines may have the same process ids, so the name is random.
    """
    return None if directory is None else Path(directory) / f"{rank}-{secrets.token_hex(4)}.bin"
