"""Checkpoints written while training continues.

A step waits until its state is copied to the host; a thread then writes the copy, over a process group of its own. One
checkpoint is written at a time, and a failure is raised by the next call. In an offline run the leading rank's thread
ends with the manifest; in an online run the controller commits what its roles have written.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ptf import storage
from ptf.compute.checkpoint import Checkpoints, Entries, tensors_of, write
from ptf.compute.lease import LeaseLost
from ptf.compute.world import World
from ptf.errors import UserError
from ptf.workspace import disk


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread; all ranks construct it and call its methods together."""

    def __init__(self, world: World, timeout_s: float) -> None:
        self.world, self.timeout_s = world, timeout_s
        self._group: Any = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world.size > 1 else None
        )
        self.thread: threading.Thread | None = None  # of a checkpoint that was begun, until it has been waited for
        # of the checkpoint that was begun last: this rank's bytes; once it is written, the entries of the files of all
        # ranks, or what writing raised
        self.num_bytes = 0
        self.entries: Entries = {}
        self.error: BaseException | None = None

    def begin(
        self,
        path: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        host: Mapping[str, dict],
        before: Callable[[], None] | None = None,
        after: Callable[[Entries], None] | None = None,
    ) -> None:
        """Copy the state, and begin to write it to the directory `path`, with this rank's `host` state by file name.

        The thread calls `before` first, and `after` with the entries of the files of all ranks. The host state must not
        change any more. The checkpoint before must have been waited for.
        """
        assert self.thread is None
        # copied to the host, so that training may continue
        tensors = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), tensors_of(model, optimizer))
        self.num_bytes = sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, Tensor))
        self.entries, self.error = {}, None

        def work() -> None:
            try:
                if self.world.device.type == "cuda":
                    torch.cuda.set_device(self.world.device)  # a new thread uses the first device
                if before:
                    before()
                self.entries = write(path, tensors, host, self.world, self._group)
                if after:
                    after(self.entries)
            except BaseException as e:  # raised later, in the thread that trains
                self.error = e

        self.thread = threading.Thread(target=work, name="ptf-save", daemon=True)
        self.thread.start()

    def wait(self, wait_s: float) -> bool:
        """Return whether all ranks have ended writing, within `wait_s` seconds; then see `error` and `entries`."""
        # each rank's thread ends at a time of its own, and all must say the same
        if self.world.max(float(not self.join(wait_s))):
            return False
        self.thread = None
        return True

    def join(self, wait_s: float) -> bool:
        """Return whether this rank has ended writing, within `wait_s` seconds; other ranks are not asked."""
        if self.thread is not None:
            self.thread.join(wait_s)
        return self.thread is None or not self.thread.is_alive()


def why_not_written(error: BaseException | str, root: str, num_bytes: int) -> str:
    """Return why a checkpoint below `root` could not be written; of a full disk, how much room it has."""
    why = str(error)
    if storage.is_local(root) and ("No space left" in why or "quota exceeded" in why or disk.room(root) < num_bytes):
        return disk.full(root, needed=num_bytes)
    return why


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of an offline run in a thread; all ranks construct it and call its methods together."""

    saves: Checkpoints
    writer: BackgroundWriter
    step: int = 0  # of the checkpoint being written

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, host: dict, manifest: Mapping[str, Any]
    ) -> float:
        """Begin to write a checkpoint; return the seconds for which training waited.

        `host` is this rank's own state and must not change any more.
        """
        began = time.perf_counter()
        self.wait()
        world, saves, self.step = self.writer.world, self.saves, step
        path = str(world.together(lambda: saves.begin(step)))
        commit = partial(saves.commit, step, manifest=manifest) if world.leads else None
        # the lease is checked on every rank, before it writes its part
        self.writer.begin(path, model, optimizer, {f"host_{world.rank:05}.pt": host}, saves.lease.check, commit)
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the checkpoint is written, on all ranks.

        Raises UserError on all ranks if it could not be written, LeaseLost if another process has taken the run over.
        """
        if self.writer.thread is None:
            return
        writer, timeout_s = self.writer, self.writer.timeout_s
        failed = writer.error if writer.wait(timeout_s) else TimeoutError(f"not done after {timeout_s:g} s")
        if writer.world.max(float(failed is not None)):
            if isinstance(failed, LeaseLost):
                raise failed
            why = why_not_written(failed or "see the lines of the other ranks", self.saves.root, writer.num_bytes)
            raise UserError(
                f"the checkpoint of step {self.step} could not be written to {self.saves.path(self.step)}: {why}; "
                "the one before it is whole"
            )
