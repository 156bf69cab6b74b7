"""Transports that send the weights while the engines read them, bucket by bucket: what `ipc` and `nccl` have in common.

An engine receives a `Transfer`, which holds the policy's address; iterating over it yields one bucket after the other,
each compared with the checksum that was computed before it was sent.

A sender needs memory for two buffers of 64 MiB and for their checksums, another 128 MiB; a receiver also needs memory
for the tensors that are not yet complete. A key-value store of c10d holds the contents of each buffer and counts the
engines that have read it. A side that raises an error reports it there, so that the other side does not wait for it; a
side that is killed is detected by the process that started both.
"""

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ptf.errors import Lost
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.weights.transport import Transport
from ptf.rl.weights.verification import Bucket, Buckets, Manifest, Receipt, SyncError, checksum

BUFFER_BYTES = 64 << 20
BUFFERS = 2  # one is filled while the other is read
FAULT = "fault"
ECHO_S = 8.0  # how long to wait for the second side's error: a dead process is detected within seconds


class PeerFailed(SyncError):
    """The other side of a transfer failed, and so this side ended it."""


@dataclass(frozen=True)
class Offer:
    """The address at which one rank of the policy shares its buffers, or from which it broadcasts."""

    address: str
    port: int
    host: str
    device: str  # the GPU's UUID; "cpu" of a CPU
    handles: tuple[Any, ...] = ()  # with which another process opens each buffer (ipc)


class TransferStore:
    """A key-value store, and a wait for a key that ends at a deadline or when the other side has failed."""

    def __init__(self, address: str, port: int, timeout_s: float, listening: socket.socket | None = None) -> None:
        limit, fd = timedelta(seconds=timeout_s), listening.detach() if listening else None
        self.store = dist.TCPStore(
            address, port, None, fd is not None, limit, False, master_listen_fd=fd, use_libuv=True
        )
        self.timeout_s = timeout_s

    def wait(self, version: int, missing: str, is_ready: Callable[[], bool]) -> None:
        """Return when `is_ready` does. Raises PeerFailed, or TimeoutError with what is `missing`."""
        until, pause = time.monotonic() + self.timeout_s, 1e-4
        while not is_ready():
            if self.store.check([f"{version}/{FAULT}"]):
                raise PeerFailed(
                    f"weight sync {version}: the other side failed: {self.store.get(f'{version}/{FAULT}').decode()}"
                )
            if time.monotonic() > until:
                raise TimeoutError(f"weight sync {version}: {missing} after {self.timeout_s:g} s (compute.timeout_s)")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def report_failure(self, version: int, error: BaseException) -> None:
        """Let the other side know that this side has failed."""
        with contextlib.suppress(Exception):  # the other side may be gone
            self.store.set(f"{version}/{FAULT}", f"{type(error).__name__}: {error}"[:500])


class Sender:
    """The policy's side, in a process of a rank that sends."""

    def __init__(self, device: torch.device, receivers: int, timeout_s: float) -> None:
        self.device, self.receivers = device, receivers
        address = self.address()
        listening = socket.create_server((address, 0))
        port = listening.getsockname()[1]
        self.store = TransferStore(address, port, timeout_s, listening)
        made = [self.buffer() for _ in range(BUFFERS)]
        self.buffers = [buffer for buffer, _ in made]
        self.offer = Offer(address, port, host(), name_of(device), tuple(handle for _, handle in made))
        self.keys: list[str] = []  # that this version has in the store

    def address(self) -> str:
        """Return the address at which the engines reach this process."""
        return "127.0.0.1"

    def buffer(self) -> tuple[Tensor, Any]:
        """Return a buffer, and the handle with which another process opens it, if it can."""
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=self.device), None

    def hand_over(self, version: int, filled: Tensor) -> None:
        """Give the engines the filled part of a buffer, once the store describes it."""

    def send(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send all tensors, in order, and return when every engine has read the last one.

        Raises SyncError if an engine failed, TimeoutError at the deadline.
        """
        try:
            self._send(version, tensors)
        except BaseException as error:
            self.store.report_failure(version, error)
            raise

    def _send(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        store, sent = self.store, 0
        for key in self.keys:  # of the version before, which every engine has read
            store.store.delete_key(key)
        self.keys = []
        for pieces in _fill_buffers(tensors):
            buffer = self.buffers[sent % BUFFERS]
            self._await_read(version, sent - BUFFERS)
            at = 0
            for *_, data in pieces:
                buffer[at : at + len(data)] = data
                at += len(data)
            filled = -(-at // 8) * 8
            buffer[at:filled] = 0
            description = {"bytes": filled, "sum": checksum(buffer[:filled]), "pieces": [piece for *piece, _ in pieces]}
            self._publish(version, sent, description)
            self.hand_over(version, buffer[:filled])
            sent += 1
        self._publish(version, sent, {"end": sent})
        self._await_read(version, sent)

    def _publish(self, version: int, number: int, description: Mapping[str, Any]) -> None:
        self.store.store.set(f"{version}/{number}", json.dumps(description))
        self.keys += [f"{version}/{number}", f"{version}/{number}/read"]

    def _await_read(self, version: int, number: int) -> None:
        if number >= 0:
            self.store.wait(
                version,
                f"{self.receivers} engines had not all read part {number}",
                lambda: self.store.store.add(f"{version}/{number}/read", 0) >= self.receivers,
            )


def _fill_buffers(
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[list[tuple[str, str, list[int], int, int, Tensor]]]:
    """Yield the contents of one buffer after the other: pieces of tensors as (name, type, shape, offset in the tensor,
    number of bytes, bytes)."""
    pieces: list[tuple[str, str, list[int], int, int, Tensor]] = []
    room = BUFFER_BYTES
    for name, tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        at = 0
        while at < len(data):
            part = data[at : at + room]
            pieces.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at, len(part), part))
            at, room = at + len(part), room - len(part)
            if not room:
                yield pieces
                pieces, room = [], BUFFER_BYTES
    if pieces:
        yield pieces


@dataclass
class Transfer:
    """Buckets of tensors on the engine's device that the engine owns; they can be iterated once.

    Iteration raises SyncError for a part that arrived changed, and at the end unless exactly the tensors of `names`
    arrived.
    """

    transport: type["Streamed"]
    version: int
    names: frozenset[str]
    offers: tuple[Offer, ...]  # of each rank that sends
    receivers: int  # of what one rank sends
    timeout_s: float
    device: str = "cpu"  # of the engine, whose process sets it
    complete: bool = False  # iterated to the end

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Run a block; an error in it is reported to the policy."""
        try:
            yield
        except BaseException as error:
            # where every rank sends, each listens on its own machine alone
            near = [one for one in self.offers if one.host == host() or not self.transport.from_every_rank]
            for offer in near:
                with contextlib.suppress(Exception):
                    TransferStore(offer.address, offer.port, 5).report_failure(self.version, error)
            raise

    def __iter__(self) -> Iterator[Bucket]:
        receiver = _receiver(self.transport, self.offers, self.receivers, self.timeout_s, self.device)
        store, seen, number = receiver.store.store, set[str](), 0
        incomplete: dict[str, Tensor] = {}
        while "end" not in (part := self._part(receiver.store, number)):
            buffer = receiver.receive(self.version, number % BUFFERS, part["bytes"])
            if checksum(buffer) != part["sum"]:
                raise SyncError(f"weight sync {self.version} refused: part {number} arrived changed")
            bucket = self._unpack(buffer, part["pieces"], incomplete)
            store.add(f"{self.version}/{number}/read", 1)
            for name, _ in bucket:
                if name in seen or name not in self.names:
                    raise SyncError(
                        f"weight sync {self.version} refused: {name} "
                        f"{'arrived twice' if name in seen else 'was not announced'}"
                    )
                seen.add(name)
            yield bucket
            number += 1
        if missing := sorted(self.names - seen):
            raise SyncError(f"weight sync {self.version} refused: {len(missing)} tensors did not arrive: {missing[:5]}")
        store.add(f"{self.version}/{number}/read", 1)
        self.complete = True

    def raise_if_incomplete(self) -> None:
        """Raise SyncError if the transfer was not iterated to its end."""
        if not self.complete:
            raise SyncError(f"weight sync {self.version}: the engine stopped reading before all tensors had arrived")

    def _part(self, store: TransferStore, number: int) -> dict[str, Any]:
        """Return the description of part `number`, when the policy has published it."""
        key = f"{self.version}/{number}"
        store.wait(self.version, f"the policy had not sent part {number}", lambda: store.store.check([key]))
        return json.loads(store.store.get(key))

    def _unpack(self, buffer: Tensor, pieces: list[list[Any]], incomplete: dict[str, Tensor]) -> Bucket:
        """Return the tensors that these pieces complete; the others stay in `incomplete`."""
        bucket: Bucket = []
        at = 0
        for name, kind, shape, first, n in pieces:
            if name not in incomplete:
                incomplete[name] = torch.empty(shape, dtype=getattr(torch, kind), device=buffer.device)
            data = incomplete[name].reshape(-1).view(torch.uint8)
            data[first : first + n] = buffer[at : at + n]
            at += n
            if first + n == len(data):
                bucket.append((name, incomplete.pop(name)))
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)  # before the other side fills it again
        return bucket


class Receiver:
    """An engine's side, which lives as long as the run: the store, and the buffers."""

    def __init__(self, store: TransferStore, buffers: Sequence[Tensor]) -> None:
        self.store, self.buffers = store, buffers

    def receive(self, version: int, which: int, n: int) -> Tensor:
        """Return the first n bytes of buffer `which`, filled by the policy."""
        return self.buffers[which][:n]


@functools.cache
def _receiver(
    transport: type["Streamed"], offers: tuple[Offer, ...], receivers: int, timeout_s: float, device: str
) -> Receiver:
    """Return an engine's connection to the policy, which is made once in each process."""
    return transport.receiver(offers, receivers, timeout_s, torch.device(device))


def name_of(device: torch.device) -> str:
    """Return a GPU's UUID, which is the same in every process; "cpu" of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


@functools.cache
def host() -> str:
    """Return a name of this machine; a container with a PID namespace of its own counts as a machine."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


class Streamed(Transport):
    """A transport whose engines read while the policy sends."""

    from_every_rank = False  # True: each rank of the policy sends to one engine; False: only its first, to all
    sender: ClassVar[type[Sender]]  # the side of a rank of the policy
    # the side of an engine on a device, which connects to one of the offers
    receiver: ClassVar[Callable[[tuple[Offer, ...], int, float, torch.device], Receiver]]

    @override
    def open(self, policy: RoleGroup, version: int) -> tuple[Transfer, Manifest]:
        engines = 1 if self.from_every_rank else self.engines
        return policy.call("open_transfer", type(self), version, engines, self.timeout_s)

    @override
    def send(
        self, cluster: Cluster, policy: RoleGroup, rollout: RoleGroup, weights: Buckets, manifest: Manifest
    ) -> Receipt:
        assert isinstance(weights, Transfer)
        with cluster.together(policy, rollout, "sync"):
            return send_and_receive(policy, rollout, weights, manifest)


def send_and_receive(policy: RoleGroup, rollout: RoleGroup, transfer: Transfer, manifest: Manifest) -> Receipt:
    """Let the policy send a transfer while the engines receive it, and return what the engines acknowledge.

    When one side fails, the other has `ECHO_S` seconds to report its error; the error that is the cause is raised.
    """
    threads = ThreadPoolExecutor(2)
    try:
        sending = threads.submit(policy.call, "send", transfer.version)
        receiving = threads.submit(rollout.call, "receive", transfer, manifest)
        both = [sending, receiving]
        wait(both, return_when=FIRST_EXCEPTION)
        wait(both, timeout=ECHO_S)
        if errors := [error for one in both if one.done() and (error := one.exception())]:
            raise min(errors, key=lambda error: (not isinstance(error, Lost), isinstance(error, PeerFailed)))
        return receiving.result()
    finally:
        threads.shutdown(wait=False)  # a side that still waits ends with its process
