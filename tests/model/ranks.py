"""One function on two processes that form a gloo group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, function: Callable[[], Any], directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    torch.save(function(), directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(function: Callable[[], Any], directory: Path) -> list[Any]:
    """What `function` (of a module's top level) returned on rank 0 and on rank 1."""
    mp.spawn(_rank, (function, directory), nprocs=2)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]
