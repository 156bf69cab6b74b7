"""Memory that a role lends to others while it waits. The one idea: a tensor's storage is copied away and emptied, and later filled again in place, so
that every view, alias and shard of it, and the optimizer that holds it, is what it was."""

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


class Parking:
    """Where the tensors of one role on one worker wait: in a file, or without one in host memory."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.digest = b""
        self.waiting: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []  # storage, its bytes, its copy where there is no file

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of these tensors, which nothing may read until `wake`. Raises OSError, leaving all as it was, if the file cannot be
        written. Parking what waits already does nothing."""
        if self.waiting:
            return
        distinct: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.nbytes():
                distinct[storage.data_ptr()] = storage
        fixed = sum(not storage.resizable() for storage in distinct.values())
        if fixed:
            raise RuntimeError(f"{fixed} of {len(distinct)} tensors have memory that is not torch's own, or that NumPy has seen, and cannot be given back")
        waiting = [(storage, storage.nbytes(), None if self.file else _bytes(storage).to("cpu", copy=True)) for storage in distinct.values()]
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
        give_back()

    def wake(self) -> None:
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
        """Returns the SHA-256."""
        sha = hashlib.sha256()
        with open(file, "wb") as out:
            for storage in storages:
                host = _bytes(storage).cpu()  # kept while it is read: on a GPU it is a copy
                out.write(_memory(host))
                sha.update(_memory(host))
        return sha.digest()

    @property
    def bytes(self) -> int:
        """What waits here."""
        return sum(size for _, size, _ in self.waiting)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(values: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU. (After `numpy()` a storage can no longer be resized.)"""
    return memoryview((ctypes.c_char * len(values)).from_address(values.data_ptr())).cast("B")


def give_back() -> None:
    """Return freed memory to the operating system, and that of a GPU to whoever shares it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # what was there before is no longer held
    with contextlib.suppress(OSError, AttributeError):  # a C library without it returns memory as it likes
        ctypes.CDLL(None).malloc_trim(0)


def own_file(directory: str | None, rank: int) -> Path | None:
    """For one role on one worker, in the directory of that role; replicas all have rank 0, and machines the same process ids."""
    return None if directory is None else Path(directory) / f"{rank}-{secrets.token_hex(4)}.bin"
