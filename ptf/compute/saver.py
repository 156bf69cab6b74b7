"""Checkpoints written while training goes on.

The one idea: a step waits until its state is copied to the host; a thread then writes the copy, over a process group of its own, and the leading
rank's ends with the manifest. One save is on its way at a time, and a failed one is an error at the next chance to say so.
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
    return f"host_{rank:05}.pt"


class Saver:
    """Made, and its methods called, by all ranks together."""

    def __init__(self, saves: Checkpoints, world: World, timeout_s: float) -> None:
        self._saves, self._world, self._timeout_s = saves, world, timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world.size > 1 else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = self._bytes = 0  # of what is being written, on this rank

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, host: dict, manifest: Mapping[str, Any]) -> float:
        """Begin to write step `step`; `host` is this rank's own state and must not change any more. Seconds for which training waited."""
        began = time.perf_counter()
        self.wait()
        world = self._world
        place = str(world.share(self._saves.begin(step) if world.leads else None))
        tensors = copied(tensors_of(model, optimizer))
        self._bytes = sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))

        def work() -> None:
            try:
                if world.device.type == "cuda":
                    torch.cuda.set_device(world.device)  # a thread begins with the first one
                self._saves.lease.check()  # on every rank, before it writes its part
                entries = write(place, tensors, {host_file(world.rank): host}, world, self._group)
                if world.leads:
                    self._saves.commit(step, entries, manifest)
            except BaseException as e:  # whatever it is, it belongs to who trains
                self._error = e

        self._step = step
        self._thread = threading.Thread(target=work, name="ptf-save", daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until what was begun is written, on all ranks. Raises UserError, on all ranks, where it could not be (LeaseLost, where another has taken over)."""
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        late = self._thread.is_alive()
        self._thread = None
        failed = self._error or (TimeoutError(f"not done after {self._timeout_s:g} s") if late else None)
        if self._world.max(float(failed is not None)):
            if isinstance(failed, LeaseLost):
                raise failed
            why = str(failed or "see the other ranks' lines")
            if storage.is_local(root := self._saves.root) and ("No space left" in why or "quota exceeded" in why or disk.room(root) < self._bytes):
                why = disk.full(root, needed=self._bytes)
            raise UserError(f"the checkpoint of step {self._step} could not be written to {self._saves.path(self._step)}: {why}; the one before it is whole")

    def close(self, grace_s: float = 60.0) -> None:
        """After an error: let what was begun be written, if it can be."""
        if self._thread is not None:
            self._thread.join(grace_s)
