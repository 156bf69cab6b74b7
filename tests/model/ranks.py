"""One function on several processes that form a gloo group.

They are forked from a server that has imported what they need: importing torch and ptf.model takes 3 CPU-seconds a
process, which is most of what such a test would cost.
"""

import faulthandler
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.meshes import Meshes
from ptf.model.parallel_parity import run_ranks

# torch imports its compiler at the first step of an optimizer and in state dicts; nothing of `tests`, of which the
# server, started in any directory, may find another package
IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "ptf.train.loop"]


def _rank(rank: int, directory: Path, function: Callable[[], Any], size: int, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # that of the server is of the time when it was started
    os.environ.update(environment)
    faulthandler.enable()  # a rank that a signal ends says where each of its threads was
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    torch.save(function(), directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def world_of(sizes: MeshSizes) -> World:
    """This rank's world, divided so."""
    return World(dist.get_rank(), Meshes.of("cpu", sizes))


def on_processes(size: int, function: Callable[[], Any], directory: Path) -> list[Any]:
    """Return what `function`, which must be picklable, returns on each of `size` ranks. The ranks keep their files
    in `directory`."""
    rank = partial(_rank, function=function, size=size, environment=dict(os.environ))
    out = run_ranks(rank, size, directory, IMPORTED)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(size)]


def two_ranks(function: Callable[[], Any], directory: Path) -> list[Any]:
    """Return what `function`, which is defined at the top of a module, returns on rank 0 and on rank 1."""
    return on_processes(2, function, directory)
