"""Bytes between the ranks of a small group, on the CPU, beside whatever the GPUs are doing.

The one idea: a process group of gloo's own, used from one thread only, so that what is sent here never gets between a step's collectives.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ptf.compute.world import World


class ProcessPeers:
    """ptf.data.exchange.Peers over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, value: bytes) -> list[bytes]:
        """Everyone's value, in the order of the ranks; all are equally long."""
        mine = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return [one.numpy().tobytes() for one in found]

    def scatter(self, values: Sequence[bytes]) -> list[bytes]:
        """Value i goes to rank i; what each sent here, in the order of the ranks."""
        sizes = torch.tensor([len(value) for value in values])
        coming = torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(coming, sizes, group=self._group)
        going = torch.frombuffer(bytearray().join(values) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        arrived = torch.empty(int(coming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(arrived, going, coming.tolist(), sizes.tolist(), group=self._group)
        return [part.numpy().tobytes() for part in arrived.split(coming.tolist())]


def peers(world: World, size: int, timeout_s: float) -> ProcessPeers | None:
    """This rank's group of `size` data-parallel ranks, neighbours of each other; None alone. All ranks call it together. Of ranks that see the same
    data, each is in a group of its own kind."""
    if world.mesh is None or world.data_size == 1 or size == 1:
        return None
    found = None
    for tensor in range(world.tensor):
        for first in range(0, world.data_size, size):
            ranks = [data * world.tensor + tensor for data in range(first, first + size)]
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
            if world.rank in ranks:
                found = ProcessPeers(group)  # type: ignore[arg-type]
    return found
