"""Exchange of bytes between the ranks of a small group, on the CPU, in parallel with the GPUs.

It uses a gloo process group of its own, from one thread only, so its traffic never mixes with a step's collectives.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from ptf.compute.world import World


class ProcessPeers:
    """ptf.data.rank_balancing.Peers over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()

    def all_gather(self, value: bytes) -> list[bytes]:
        """Return every rank's value, in the order of the ranks; all have the same length."""
        own = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        result = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(result, own, group=self._group)
        return [one.numpy().tobytes() for one in result]

    def all_to_all(self, values: Sequence[bytes]) -> list[bytes]:
        """Send value i to rank i; return what each rank sent here, in the order of the ranks."""
        sizes = torch.tensor([len(value) for value in values])
        incoming = torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(incoming, sizes, group=self._group)
        outgoing = torch.frombuffer(bytearray().join(values) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, outgoing, incoming.tolist(), sizes.tolist(), group=self._group)
        return [part.numpy().tobytes() for part in received.split(incoming.tolist())]


def peers(world: World, size: int, timeout_s: float) -> ProcessPeers | None:
    """Return this rank's group of `size` neighbouring data-parallel ranks; None if there is only one rank.

    All ranks call it together. Ranks that see the same data are in different groups.
    """
    sizes = world.meshes.sizes
    if world.meshes.dense is None or sizes.data == 1 or size == 1:
        return None
    result = None
    for place in range(sizes.model):
        for first in range(0, sizes.data, size):
            ranks = [data * sizes.model + place for data in range(first, first + size)]
            group = cast(
                "dist.ProcessGroup", dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
            )
            if world.rank in ranks:
                result = ProcessPeers(group)
    return result
