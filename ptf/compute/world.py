"""A process among its peers: rank, size, device and mesh, passed as an argument and never looked up.

Losses and metrics are reduced by sums in float64 (`sum`) and by maxima (`max`); `sum_and_max` does both and waits for
the device once. Ranks of one tensor group hold one model together and see the same data, so data is distributed, and
sums are taken, over the data-parallel ranks; maxima are taken over all ranks.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptf.compute import heap
from ptf.compute.heartbeat import Clock, beating
from ptf.errors import UserError

CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The rank of a process, the number of ranks, its device and its mesh."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    mesh: DeviceMesh | None = None  # ("replicate", "shard", "tensor"); None: one process without collectives
    clock: Clock = field(default_factory=Clock, compare=False)  # the phase that this process is in

    @property
    def leads(self) -> bool:
        """Whether this is the one rank that writes shared files."""
        return self.rank == 0

    @cached_property  # a mesh computes its coordinates anew for every name: a millisecond
    def tensor_parallel_size(self) -> int:
        """Number of ranks that see the same data."""
        return 1 if self.mesh is None else self.mesh["tensor"].size()

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data."""
        return self.size // self.tensor_parallel_size

    @property
    def data_rank(self) -> int:
        """Index of this rank's share among the `data_parallel_size` shares of the data."""
        return self.rank // self.tensor_parallel_size

    def sum(self, value: torch.Tensor | float | Sequence[float]) -> torch.Tensor:
        """Sum over the data-parallel ranks, as float64 on the CPU; a scalar or a vector.

        Ranks of one tensor group pass the same value. Values of the host are summed without the GPU, so that nothing
        waits for it.
        """
        return self._reduced(torch.as_tensor(value, dtype=torch.float64), dist.ReduceOp.SUM).cpu()

    def max(self, value: float) -> float:
        """Return the largest value over all ranks, of values of the host."""
        return self.maxima(value)[0]

    def maxima(self, *values: float) -> list[float]:
        """Return the largest of each value over all ranks, of values of the host."""
        return self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist()

    def sum_and_max(self, sums: torch.Tensor, largest: torch.Tensor) -> tuple[list[float], list[float]]:
        """Return the sums of one vector over the data-parallel ranks, and the maxima of another over all ranks.

        Both are on this rank's device, which is waited for once.
        """
        each = ((sums, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX))
        values = torch.cat([self._reduced(value.double(), op) for value, op in each]).cpu().tolist()
        return values[: len(sums)], values[len(sums) :]

    def _reduced(self, value: torch.Tensor, op: Any) -> torch.Tensor:
        """Return the sum over the data-parallel ranks, or the maximum over all ranks, on the device of the value."""
        if self.mesh is None or self.size == 1:
            return value.detach()
        found, over_all = value.detach().clone(), op == dist.ReduceOp.MAX or self.tensor_parallel_size == 1
        dist.all_reduce(found, op, group=None if over_all else data_ranks(self.mesh).get_group())
        return found

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.max(0.0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in their order, on every rank."""
        values = [value] * self.size
        if self.mesh is not None and self.size > 1:
            dist.all_gather_object(values, value)
        return values

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
        if self.mesh is not None and self.size > 1:
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
        seed = int(np.random.SeedSequence([*key, self.data_rank]).generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed formats a stack for each kind of device without one
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


def make_mesh(device: str, size: int, replicate: int, tensor: int) -> DeviceMesh:
    """Build a mesh replicate × shard × tensor.

    Neighbours form a tensor group: they share a machine and its fast links. Raises UserError unless `replicate` ×
    `tensor` divides the ranks.
    """
    if size % (replicate * tensor):
        raise UserError(
            f"compute.mesh: replicate ({replicate}) × tensor_parallel_size ({tensor}) must divide the {size} workers"
        )
    mesh = init_device_mesh(
        device, (replicate, size // (replicate * tensor), tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    # it logs hints about microseconds at an export, 4 lines each
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if tensor > 1:
        data_ranks(mesh)  # creates a process group, which all ranks must do together
    return mesh


def data_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that see different data, as a mesh of one dimension; it is built once."""
    return mesh["replicate", "shard"]._flatten("data")


@contextlib.contextmanager
def joined(
    device: str, timeout_s: float, replicate: int = 1, threads: int | None = None, tensor: int = 1
) -> Iterator[World]:
    """Join the process group and yield this process's World; leave the group on exit.

    The rank comes from the variables that torchrun and the Ray gang set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*);
    without them it is a world of one with its own process group. Raises UserError for a mesh that does not divide the
    ranks.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = pick_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    if threads:
        torch.set_num_threads(threads)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        heap.keep()
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout_s)
    if size > 1:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=limit)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    try:
        world = World(rank, size, where, make_mesh(where.type, size, replicate, tensor))
        with beating(world.clock, rank):
            # without it, a rank that fails at once leaves the others waiting for their groups until the deadline
            world.barrier()
            yield world
    finally:
        dist.destroy_process_group()
