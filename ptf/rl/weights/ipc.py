"""The transport `ipc`: memory that two processes of one machine share (CUDA IPC; on a CPU a file in memory), from each
rank of the policy to the engine on its own device."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ptf.rl.weights import streamed
from ptf.rl.weights.streamed import Offer, Receiver, Sender, Streamed, TransferStore, host, name_of
from ptf.rl.weights.verification import SyncError


class IpcSender(Sender):
    """A rank of the policy, and one engine that opens its buffers."""

    def buffer(self) -> tuple[Tensor, Any]:
        """Return a buffer, and the handle with which another process of this machine opens it."""
        if self.device.type == "cuda":
            buffer, _ = super().buffer()
            return buffer, reduce_tensor(buffer)[1]
        fd = os.memfd_create("ptf-weights")  # freed with the last process that has it open, however that ends
        os.ftruncate(fd, streamed.BUFFER_BYTES)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return torch.from_file(path, shared=True, size=streamed.BUFFER_BYTES, dtype=torch.uint8), path


class IpcReceiver(Receiver):
    """An engine, which reads the buffers of the rank on its device."""

    def __init__(self, offers: tuple[Offer, ...], engines: int, timeout_s: float, device: torch.device) -> None:
        """Connect to the rank on this device. Raises SyncError unless exactly one is on this engine's GPU."""
        mine = [offer for offer in offers if (offer.host, offer.device) == (host(), name_of(device))]
        if not mine or (device.type == "cuda" and len(mine) > 1):
            raise SyncError(
                f"rollout.transport: ipc: {len(mine)} ranks of the policy are on this engine's {device.type} "
                f"{name_of(device)} of {host()}, but ipc needs exactly one; set rollout.transport to files or "
                "object_store, or to nccl with policy and rollout in different compute.pools"
            )
        store = TransferStore(mine[0].address, mine[0].port, timeout_s)
        if len(mine) > 1 and (number := (store.store.add("engines", 1) - 1) % len(mine)):
            mine = mine[number:]
            store = TransferStore(mine[0].address, mine[0].port, timeout_s)
        super().__init__(store, [opened(handle, device) for handle in mine[0].handles])


class Ipc(Streamed):
    """Each rank of the policy shares its buffers with the engine on its device."""

    from_every_rank = True
    sender, receiver = IpcSender, IpcReceiver


def opened(handle: Any, device: torch.device) -> Tensor:
    """Return the buffer that another process of this machine shares."""
    if device.type == "cuda":
        arguments = list(handle)
        arguments[6] = device.index  # the same GPU may have another index in every process
        return rebuild_cuda_tensor(*arguments)
    return torch.from_file(handle, shared=True, size=streamed.BUFFER_BYTES, dtype=torch.uint8)
