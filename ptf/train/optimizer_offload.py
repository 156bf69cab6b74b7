"""AdamW's moments (its averages) in host memory, except while a step updates them (`train.optimizer: adamw_offload`).

The gradients are clipped over all parameters before the first bucket. For each bucket of parameters, a step then
restores the moments, updates the parameters, and offloads the moments again; the result is the same to the bit as
without offloading.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptf.compute.offload import SLAB_BYTES, OffloadedTensors, PinnedMemory, release_freed_memory

BUCKET_BYTES = SLAB_BYTES  # bytes of moments on the device at once; a larger parameter is a bucket of its own


class OffloadedMoments:
    """The state of an optimizer, which is on the device of the parameters only in `step` and `whole`."""

    def __init__(self, optimizer: torch.optim.Optimizer, limit: int = BUCKET_BYTES) -> None:
        self.optimizer = optimizer
        # with the number of the group, not the group, because loading a state replaces the groups
        self.buckets: list[tuple[int, list[nn.Parameter], OffloadedTensors]] = []
        pinned, first = PinnedMemory(), 0
        for number, group in enumerate(optimizer.param_groups):
            for parameters in buckets(group["params"], limit):
                self.buckets.append((number, parameters, OffloadedTensors(None, pinned, first)))
                first += sum(2 * local(parameter).nbytes for parameter in parameters)

    def step(self) -> None:
        """Make one step of the optimizer, bucket by bucket."""
        groups = self.optimizer.param_groups
        try:
            for number, parameters, offloaded in self.buckets:
                offloaded.restore()
                self.optimizer.param_groups = [{**groups[number], "params": parameters}]
                self.optimizer.step()
                offloaded.offload(self._state(parameters), release=False)
        finally:
            self.optimizer.param_groups = groups

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Run a block with the whole state on the device, to save or load it; no activations are held meanwhile."""
        for _, _, offloaded in self.buckets:
            offloaded.restore()
        try:
            yield
        finally:
            for _, parameters, offloaded in self.buckets:
                offloaded.offload(self._state(parameters), release=False)
            release_freed_memory()

    def _state(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the moments; the number of steps, a scalar, stays where it is."""
        state: Any = self.optimizer.state
        values = (value for p in parameters for value in state.get(p, {}).values())
        return [value for value in values if isinstance(value, Tensor) and value.dim()]


def buckets(parameters: Iterable[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in lists whose moments take at most `limit` bytes; a larger parameter is a list of one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = 2 * local(parameter).nbytes
        if bucket and size + own > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += own
    if bucket:
        yield bucket


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
