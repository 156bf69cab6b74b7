"""Batches on their way from the host to the device."""

from collections.abc import Iterator, Sequence

import torch

from ptf.data.batch import Batch


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on a device. While one batch is used on a GPU, the next one is copied there on another stream.

    The caller must keep the host's batches unchanged until the GPU has finished the work that was queued: a copy from
    pinned memory returns before it is complete.
    """
    if device.type != "cuda":
        yield from batches
        return
    copying, computing = torch.Stream(device=device), torch.accelerator.current_stream(device)

    def copied(batch: Batch) -> Batch:
        with copying:
            return batch.to(device)

    following = copied(batches[0])
    for i in range(len(batches)):
        batch = following
        computing.wait_stream(copying)
        for tensor in batch.tensors():
            tensor.record_stream(computing)  # so that its memory is not used again while it is read
        if i + 1 < len(batches):
            following = copied(batches[i + 1])
        yield batch
