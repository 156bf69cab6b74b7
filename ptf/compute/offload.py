"""Offloading of a role's memory while it waits, so that others can use it.

A tensor's storage is copied away and emptied, and later filled again in place, so that every view, alias and shard of
it, and the optimizer that holds it, stay valid.
"""

import contextlib
import ctypes
import gc
import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class OffloadedTensors:
    """The offloaded tensors of one role on one worker: in a file, or in host memory if `file` is None."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.digest = b""
        # storage, its size in bytes, and its copy if there is no file
        self.waiting: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of these tensors, which nothing may read until `restore`; tensors that are offloaded
        already stay so.

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
        waiting = [
            (storage, storage.nbytes(), None if self.file else _bytes(storage).to("cpu", copy=True))
            for storage in distinct.values()
        ]
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.digest = self._write(self.file, [storage for storage, _, _ in waiting])
            except BaseException:
                self.file.unlink(missing_ok=True)
                raise
        for storage, _, _ in waiting:
            storage.resize_(0)
        self.waiting = waiting
        release_freed_memory()

    def restore(self) -> None:
        """Fill the storages again. Raises OSError or RuntimeError if the file is not what was written."""
        sha = hashlib.sha256()
        with open(self.file, "rb") if self.file and self.waiting else contextlib.nullcontext() as file:
            for storage, size, copy in self.waiting:
                storage.resize_(size)
                values = _bytes(storage)
                if copy is None:
                    copy = values if values.device.type == "cpu" else torch.empty(size, dtype=torch.uint8)
                    if file is None or file.readinto(_memory(copy)) != size:
                        raise RuntimeError(f"{self.file} is shorter than what was written to it")
                    sha.update(_memory(copy))
                if copy is not values:
                    values.copy_(copy)
        if self.waiting and self.file:
            if sha.digest() != self.digest:
                raise RuntimeError(f"{self.file} is not what was written to it")
            self.file.unlink()
        self.waiting = []

    @staticmethod
    def _write(file: Path, storages: Iterable[torch.UntypedStorage]) -> bytes:
        """Write the storages; return their SHA-256."""
        sha = hashlib.sha256()
        with open(file, "wb") as out:
            for storage in storages:
                host = _bytes(storage).cpu()  # a reference must be held while it is read: on a GPU it is a copy
                out.write(_memory(host))
                sha.update(_memory(host))
        return sha.digest()

    @property
    def bytes(self) -> int:
        """The number of offloaded bytes."""
        return sum(size for _, size, _ in self.waiting)


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
        torch.cuda.reset_peak_memory_stats()  # the earlier peak was of memory that is now freed
    with contextlib.suppress(OSError, AttributeError):  # some C libraries lack it, and return memory by their own rules
        ctypes.CDLL(None).malloc_trim(0)


def own_file(directory: str | None, rank: int) -> Path | None:
    """Return a unique file for one role on one worker, in the directory of that role; None without a directory.

    Replicas all have rank 0, and machines may have the same process ids, so the name is random.
    """
    return None if directory is None else Path(directory) / f"{rank}-{secrets.token_hex(4)}.bin"
