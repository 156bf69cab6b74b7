"""Checkpoints written while training continues.

A step waits until its state is copied to the host; a thread then writes the copy, over a process group of its own, and
the leading rank's thread ends with the manifest. One checkpoint is written at a time, and a failure is raised by the
next call.
"""

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ptf import disk, storage
from ptf.compute.checkpoint import Checkpoints, copied, tensors_of, write
from ptf.compute.lease import LeaseLost
from ptf.compute.world import World
from ptf.errors import UserError


def host_file(rank: int) -> str:
    """Return the file name of a rank's host state."""
    return f"host_{rank:05}.pt"


class Saver:
    """Writes checkpoints in a thread; all ranks construct it and call its methods together."""

    def __init__(self, saves: Checkpoints, world: World, timeout_s: float) -> None:
        self._saves, self._world, self._timeout_s = saves, world, timeout_s
        self._group: Any = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world.size > 1 else None
        )
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = self._bytes = 0  # of the checkpoint being written, on this rank

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, host: dict, manifest: Mapping[str, Any]
    ) -> float:
        """Begin to write a checkpoint; return the seconds for which training waited.

        `host` is this rank's own state and must not change any more.
        """
        began = time.perf_counter()
        self.wait()
        world = self._world
        path = str(world.broadcast_object(self._saves.begin(step) if world.leads else None))
        tensors = copied(tensors_of(model, optimizer))
        self._bytes = sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))

        def work() -> None:
            try:
                if world.device.type == "cuda":
                    torch.cuda.set_device(world.device)  # a new thread uses the first device
                self._saves.lease.check()  # on every rank, before it writes its part
                entries = write(path, tensors, {host_file(world.rank): host}, world, self._group)
                if world.leads:
                    self._saves.commit(step, entries, manifest)
            except BaseException as e:  # raised by `wait`, in the thread that trains
                self._error = e

        self._step = step
        self._thread = threading.Thread(target=work, name="ptf-save", daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the checkpoint is written, on all ranks.

        Raises UserError on all ranks if it could not be written, LeaseLost if another process has taken the run over.
        """
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        late = self._thread.is_alive()
        self._thread = None
        failed = self._error or (TimeoutError(f"not done after {self._timeout_s:g} s") if late else None)
        if self._world.max(float(failed is not None)):
            if isinstance(failed, LeaseLost):
                raise failed
            why = str(failed or "see the lines of the other ranks")
            if storage.is_local(root := self._saves.root) and (
                "No space left" in why or "quota exceeded" in why or disk.room(root) < self._bytes
            ):
                why = disk.full(root, needed=self._bytes)
            raise UserError(
                f"the checkpoint of step {self._step} could not be written to {self._saves.path(self._step)}: {why}; "
                "the one before it is whole"
            )

    def close(self, grace_s: float = 60.0) -> None:
        """After an error, wait up to `grace_s` for a checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join(grace_s)
