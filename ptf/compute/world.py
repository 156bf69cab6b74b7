"""Where a process stands among its peers: rank, size, device and mesh, passed in and never looked up.

The one idea: `World.sum` is the only reduction that losses and metrics need, and it is exact to add to (float64).
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptf.errors import UserError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    mesh: DeviceMesh | None = None  # ("replicate", "shard"); None: one process without collectives

    @property
    def leads(self) -> bool:
        """True on the one rank that writes what only one may write."""
        return self.rank == 0

    def sum(self, value: torch.Tensor | float | Sequence[float]) -> torch.Tensor:
        """Sum over all ranks, as float64 on the CPU; a scalar or a vector."""
        total = torch.as_tensor(value, dtype=torch.float64).detach().to(self.device if self.device.type == "cuda" else "cpu")
        if self.mesh is not None and self.size > 1:
            total = total.clone()
            dist.all_reduce(total)
        return total.cpu()

    def max(self, value: float) -> float:
        """Largest over all ranks."""
        most = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        if self.mesh is not None and self.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def barrier(self) -> None:
        self.sum(0.0)

    def share(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.mesh is not None and self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    """`auto` is the GPU where there is one. Raises UserError if `cuda` is asked for and absent."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("compute.device is cuda, but torch sees no GPU on this machine; use cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextlib.contextmanager
def joined(device: str, timeout_s: float, replicate: int = 1, threads: int | None = None) -> Iterator[World]:
    """This process's World, from the rank variables that torchrun and the Ray gang set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*);
    without them, or alone, a world of one with a process group of its own. Leaves the group on exit."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = pick_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    if threads:
        torch.set_num_threads(threads)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout_s)
    if size > 1:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=limit)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    try:
        mesh = init_device_mesh(where.type, (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
        yield World(rank, size, where, mesh)
    finally:
        dist.destroy_process_group()
