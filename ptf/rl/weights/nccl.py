"""The transport `nccl`: a broadcast from the policy's first rank to all engines (with gloo on a CPU)."""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptf.rl.weights import streamed
from ptf.rl.weights.streamed import BUFFERS, Offer, Receiver, Sender, Streamed, TransferStore


class NcclSender(Sender):
    """The policy's first rank."""

    _group: Any = None

    def address(self) -> str:
        """Return this machine's address in the job."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    def hand_over(self, version: int, filled: Tensor) -> None:
        """Broadcast it."""
        if self._group is None:
            self._group = _process_group(self.store, 0, 1 + self.receivers, self.device)
        _broadcast(self._group, filled, self.store, version)


class NcclReceiver(Receiver):
    """An engine, whose buffers the broadcasts fill."""

    def __init__(self, offers: tuple[Offer, ...], engines: int, timeout_s: float, device: torch.device) -> None:
        store = TransferStore(offers[0].address, offers[0].port, timeout_s)
        buffers = [torch.empty(streamed.BUFFER_BYTES, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        super().__init__(store, buffers)
        self._group = _process_group(store, store.store.add("engines", 1), 1 + engines, device)

    def receive(self, version: int, which: int, n: int) -> Tensor:
        """See Receiver."""
        buffer = super().receive(version, which, n)
        _broadcast(self._group, buffer, self.store, version)
        return buffer


class Nccl(Streamed):
    """The policy's first rank broadcasts to all engines."""

    sender, receiver = NcclSender, NcclReceiver


def _process_group(store: TransferStore, rank: int, size: int, device: torch.device) -> Any:
    """Return the process group of the sender and all receivers; it is not registered with torch.distributed."""
    prefixed, timeout = dist.PrefixStore("group", store.store), timedelta(seconds=store.timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    group: Any = dist.ProcessGroupGloo  # whose options its types leave out
    options = group._Options()
    # connecting a UDP socket sends nothing; it gives the address of this machine on the route to the policy
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.store.host, store.store.port))
        own = probe.getsockname()[0]
    options._devices = [group.create_device(hostname=own)]
    options._timeout = timeout
    return group(prefixed, rank, size, options)


def _broadcast(group: Any, buffer: Tensor, store: TransferStore, version: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work = group.broadcast([buffer], options)
    # without this, a broadcast that the other side has left would last until the group's own deadline
    store.wait(version, "a broadcast was not over", work.is_completed)
    work.wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
