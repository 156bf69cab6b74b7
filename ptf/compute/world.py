"""A process among its peers: rank, size, device and mesh, passed as an argument and never looked up.

Ranks of one model group hold every layer together and see the same data, so data is distributed, and sums are taken,
over ranks of different groups. Neighbours form a tensor group: they share a machine and its fast links.

Losses and metrics are reduced by sums in float64 (`sum`) and by maxima (`max`); `sum_and_max` does both and waits for
the device once. Sums are taken over the data-parallel ranks, maxima over all ranks.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ptf.compute.heartbeat import Clock, beating
from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from ptf.meshes import Meshes

CPU = torch.device("cpu")
T = TypeVar("T")
# glibc maps every large tensor anew and gives it back to the kernel when it is freed, so each step touches all of its
# memory for the first time. A process that keeps what it has freed takes less CPU time for a step: the peers are run
# both ways (benchmarks/train_step.py). With an empty GLIBC_TUNABLES it leaves the heap as glibc has it.
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # numbers of mallopt's parameters, malloc.h
HEAP_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class World:
    """The rank of a process, its groups of ranks and its device."""

    rank: int = 0
    meshes: Meshes = field(default_factory=Meshes)
    device: torch.device = CPU
    clock: Clock = field(default_factory=Clock, compare=False)  # the phase that this process is in

    @property
    def leads(self) -> bool:
        """Whether this is the one rank that writes shared files."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.meshes.sizes.ranks

    @property
    def data_rank(self) -> int:
        """Which of the `meshes.sizes.data` shares of the data this rank sees."""
        return self.rank // self.meshes.sizes.model

    def sum(self, value: torch.Tensor | float | Sequence[float]) -> torch.Tensor:
        """Sum over the data-parallel ranks, as float64 on the CPU; a scalar or a vector.

        Ranks that see the same data pass the same value. Values of the host are summed without the GPU, so that nothing
        waits for it.
        """
        return self._reduced(torch.as_tensor(value, dtype=torch.float64), dist.ReduceOp.SUM).cpu()

    def max(self, value: float | Sequence[float]) -> torch.Tensor:
        """Return the largest over all ranks of a value of the host, or of each of several, as float64."""
        return self._reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX)

    def sum_and_max(self, sums: torch.Tensor, largest: torch.Tensor) -> tuple[list[float], list[float]]:
        """Return the sums of one vector over the data-parallel ranks, and the maxima of another over all ranks.

        Both are on this rank's device, which is waited for once.
        """
        each = ((sums, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX))
        values = torch.cat([self._reduced(value.double(), op) for value, op in each]).cpu().tolist()
        return values[: len(sums)], values[len(sums) :]

    def _reduced(self, value: torch.Tensor, op: Any) -> torch.Tensor:
        """Return the sum over the data-parallel ranks, or the maximum over all ranks, on the device of the value."""
        if self.size == 1:
            return value.detach()
        found = value.detach().clone()
        dist.all_reduce(found, op, group=None if op == dist.ReduceOp.MAX else self.meshes.data)
        return found

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.max(0.0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in their order, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def gather_data(self, value: Any) -> list[Any]:
        """Return the value of every data-parallel rank, in their order, on every rank; ranks that see the same data
        have the same value."""
        return self.all_gather_object(value)[:: self.meshes.sizes.model]

    def together(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0; return its result on every rank, or raise its error on every rank."""
        result = error = None
        if self.leads:
            try:
                result = act()
            except Exception as raised:
                error = raised
        known = error is None or isinstance(error, UserError)  # others may be no objects that processes can send
        box: list[Any] = [result, error if known else RuntimeError(f"rank 0: {error!r}")]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        result, shared = box
        if error or shared:
            raise error or shared
        return result

    def seed(self, *key: int) -> None:
        """Seed torch's global generator in this process, by a key and by the data that this rank sees.

        ptf draws from generators that it creates; recipes and components of a user may draw from torch's (dropout
        does), and repeat what they drew if the key is that of a step.
        """
        words = np.random.SeedSequence([*key, self.data_rank])
        seed = int(words.generate_state(1, np.uint64)[0])
        # torch.manual_seed formats a stack for each kind of device without one
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)


def alone(world: World) -> World:
    """Return a world of this rank only."""
    return World(device=world.device, clock=world.clock)


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device; `auto` is the GPU if there is one. Raises UserError if `cuda` is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("compute.device is cuda, but torch sees no GPU on this machine; use cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors of this process, and return whether it does.

    It is left as it is where one of the variables of `HEAP_SETTINGS` sets it, and with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in HEAP_SETTINGS):
        return False
    return mallopt(MMAP_MAX, 0) == 1 and mallopt(TRIM_THRESHOLD, -1) == 1  # no mapping of its own, no trimming


def groups_apart(machines: Sequence[str], size: int) -> int:
    """Return how many of the groups of `size` neighbouring ranks, whose machines these are, lie on several."""
    return sum(len({*machines[first : first + size]}) > 1 for first in range(0, len(machines), size))


@contextlib.contextmanager
def joined(
    device: str, timeout_s: float, sizes: MeshSizes | None = None, threads: int | None = None
) -> Iterator[World]:
    """Join the process group and yield this process's World; leave the group on exit. By default the ranks are shards.

    The rank comes from the variables that torchrun and the Ray gang set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*);
    without them it is a world of one with its own process group.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = pick_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    if threads:
        torch.set_num_threads(threads)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        keep_freed_memory()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
        store=None if size > 1 else dist.HashStore(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        world = World(rank, Meshes.of(where.type, sizes or MeshSizes(shard=size)), where)
        with beating(world.clock, rank):
            # without it, a rank that fails at once leaves the others waiting for their groups until the deadline
            world.barrier()
            model = world.meshes.sizes.model
            if model > 1 and (apart := groups_apart(world.all_gather_object(socket.gethostname()), model)) and not rank:
                print(
                    f"compute.mesh: {apart} of {size // model} groups of {model} ranks that see the same sequences lie "
                    "on several machines, and what each layer exchanges passes the network. It stays inside where "
                    "context_parallel_size × tensor_parallel_size divides the GPUs of a machine",
                    flush=True,
                )
            yield world
    finally:
        dist.destroy_process_group()
