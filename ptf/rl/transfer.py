"""Weights that go from device to device, a bucket at a time. `ipc`: through memory that two processes of one machine see (CUDA IPC; on a CPU a file
that is only in memory), each rank of the policy to the engine on its own device. `nccl`: by broadcast from the policy's first rank to all engines (gloo
on a CPU).

The one idea: an engine pulls. What travels to it is a `Transfer`, which says where the policy can be found; looked at, it gives bucket after bucket,
each compared with the checksum that was taken before it was sent. Beside its model a sender holds two buffers of 64 MiB and as much again to sum them
up, and a receiver what it has not yet taken. A key-value store of c10d carries what is in a buffer, and who has read it; whoever raises says so there,
and the other does not wait (of one that is killed, whoever started both learns).
"""

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ptf.rl.sync import Bucket, Receipt, SyncError

BUFFER_BYTES = 64 << 20
BUFFERS = 2  # one is filled while the other is read
FAULT = "fault"


class OtherSide(SyncError):
    """This side of a transfer ended because the other did."""


def checksum(data: Tensor) -> int:
    """Of bytes [n], n a multiple of 8, wherever they are: the sum of the 64-bit words, stirred (as splitmix64, Steele et al. 2014) and each times its
    own odd number, modulo 2^64. One word that changes changes it; of several, and of words that change places, no more than one case in 2^40 or so is
    missed. It is no defence against an attacker."""
    words = data.view(torch.int64)
    stirred = words >> 32
    stirred.bitwise_and_(0xFFFFFFFF).bitwise_xor_(words).mul_(-0x40A7B892E31B1A47)  # 0xBF58476D1CE4E5B9
    stirred ^= (stirred >> 29).bitwise_and_((1 << 35) - 1)
    return int(stirred.mul_(_odd(words.device)[: len(words)]).sum())


@functools.cache
def _odd(device: torch.device) -> Tensor:
    return torch.arange(BUFFER_BYTES // 8, device=device) * 2 + 1


@dataclass(frozen=True)
class Offer:
    """Where one rank of the policy lends its buffers, or broadcasts from."""

    address: str
    port: int
    host: str
    device: str  # the GPU's own name; of a CPU "cpu"
    lent: tuple[Any, ...] = ()  # how to see each buffer (ipc)


class Line:
    """A store, and the wait for a key that ends at a deadline or when the other side has failed."""

    def __init__(self, address: str, port: int, timeout_s: float, listening: socket.socket | None = None) -> None:
        limit = timedelta(seconds=timeout_s)
        if listening:
            self.store = dist.TCPStore(address, port, None, True, limit, False, master_listen_fd=listening.detach(), use_libuv=True)
        else:
            self.store = dist.TCPStore(address, port, None, False, limit, False, use_libuv=True)
        self.timeout_s = timeout_s

    def wait(self, version: int, what: str, there: Callable[[], bool]) -> None:
        until, pause = time.monotonic() + self.timeout_s, 1e-4
        while not there():
            if self.store.check([f"{version}/{FAULT}"]):
                raise OtherSide(f"weight sync {version}: the other side failed: {self.store.get(f'{version}/{FAULT}').decode()}")
            if time.monotonic() > until:
                raise TimeoutError(f"weight sync {version}: {what} after {self.timeout_s:g} s (compute.timeout_s)")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def tell(self, version: int, error: BaseException) -> None:
        """That this side has failed."""
        with contextlib.suppress(Exception):  # the other may be gone
            self.store.set(f"{version}/{FAULT}", f"{type(error).__name__}: {error}"[:500])


class Sender:
    """The policy's side, on each of its ranks (ipc) or its first (nccl)."""

    def __init__(self, how: Literal["ipc", "nccl"], device: torch.device, receivers: int, timeout_s: float) -> None:
        self.how, self.device, self.receivers = how, device, 1 if how == "ipc" else receivers
        address = os.environ.get("MASTER_ADDR", "127.0.0.1") if how == "nccl" else "127.0.0.1"
        listening = socket.create_server((address, 0))
        port = listening.getsockname()[1]
        self.line = Line(address, port, timeout_s, listening)
        made = [_shared(device) if how == "ipc" else (torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device), None) for _ in range(BUFFERS)]
        self.buffers = [buffer for buffer, _ in made]
        self.offer = Offer(address, port, host(), name_of(device), tuple(lent for _, lent in made if lent is not None))
        self.group: Any = None
        self.said: list[str] = []

    def send(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """All of them, in order. Returns when every engine has read the last one. Raises SyncError if one failed, TimeoutError."""
        try:
            self._send(version, tensors)
        except BaseException as error:
            self.line.tell(version, error)
            raise

    def _send(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        line, sent = self.line, 0
        for key in self.said:  # of the version before, which all have read
            line.store.delete_key(key)
        self.said = []
        if self.how == "nccl" and self.group is None:
            self.group = _group(line, 0, 1 + self.receivers, self.device)
        for pieces in _filled(tensors):
            buffer = self.buffers[sent % BUFFERS]
            self._await_read(version, sent - BUFFERS)
            at = 0
            for *_, data in pieces:
                buffer[at : at + len(data)] = data
                at += len(data)
            filled = -(-at // 8) * 8
            buffer[at:filled] = 0
            said = {"bytes": filled, "sum": checksum(buffer[:filled]), "pieces": [what for *what, _ in pieces]}
            self._say(version, sent, said)
            if self.group is not None:
                _broadcast(self.group, buffer[:filled], line, version)
            sent += 1
        self._say(version, sent, {"end": sent})
        self._await_read(version, sent)

    def _say(self, version: int, number: int, what: Mapping[str, Any]) -> None:
        self.line.store.set(f"{version}/{number}", json.dumps(what))
        self.said += [f"{version}/{number}", f"{version}/{number}/read"]

    def _await_read(self, version: int, number: int) -> None:
        if number >= 0:
            read = lambda: self.line.store.add(f"{version}/{number}/read", 0) >= self.receivers  # noqa: E731
            self.line.wait(version, f"{self.receivers} engines had not all read part {number}", read)


def _filled(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, str, list[int], int, int, Tensor]]]:
    """What goes into one buffer after the other: pieces of tensors as (name, type, shape, where in the tensor, bytes of it, bytes)."""
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
    """Buckets of tensors that are on the engine's device and its own; they can be looked at once. Raises SyncError for a bucket that arrived changed,
    and at the end unless exactly the tensors of `names` came."""

    how: Literal["ipc", "nccl"]
    version: int
    names: frozenset[str]
    offers: tuple[Offer, ...]  # of each rank (ipc), or of the first
    receivers: int
    timeout_s: float
    device: str = "cpu"  # of the engine, whose process sets it
    tensors: int = 0  # that came
    size: int = 0  # bytes of them
    over: bool = False  # looked at to the end

    @property
    def link(self) -> "Link":
        return _link(self.how, self.offers, self.receivers, self.timeout_s, self.device)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Whatever ends this early is told to the policy."""
        try:
            yield
        except BaseException as error:
            for offer in self.offers:
                if self.how == "ipc" and offer.host != host():
                    continue
                with contextlib.suppress(Exception):
                    Line(offer.address, offer.port, 5).tell(self.version, error)
            raise

    def __iter__(self) -> Iterator[Bucket]:
        line, seen, number = self.link.line, set[str](), 0
        coming: dict[str, Tensor] = {}
        while "end" not in (said := self._said(number)):
            buffer = self.link.receive(self.version, number % BUFFERS, said["bytes"])
            if checksum(buffer) != said["sum"]:
                raise SyncError(f"weight sync {self.version} refused: part {number} arrived changed")
            bucket = self._taken(buffer, said["pieces"], coming)
            line.store.add(f"{self.version}/{number}/read", 1)
            for name, _ in bucket:
                if name in seen or name not in self.names:
                    raise SyncError(f"weight sync {self.version} refused: {name} {'arrived twice' if name in seen else 'was not announced'}")
                seen.add(name)
                self.tensors += 1
            yield bucket
            number += 1
        if missing := sorted(self.names - seen):
            raise SyncError(f"weight sync {self.version} refused: {len(missing)} tensors did not arrive: {missing[:5]}")
        line.store.add(f"{self.version}/{number}/read", 1)
        self.over = True

    def receipt(self) -> Receipt:
        """What came. Raises SyncError if not all of it was looked at."""
        if not self.over:
            raise SyncError(f"weight sync {self.version}: the engine stopped reading after {self.tensors} of {len(self.names)} tensors")
        return Receipt(self.version, self.tensors, self.size)

    def _said(self, number: int) -> dict[str, Any]:
        line, key = self.link.line, f"{self.version}/{number}"
        line.wait(self.version, f"the policy had not sent part {number}", lambda: line.store.check([key]))
        return json.loads(line.store.get(key))

    def _taken(self, buffer: Tensor, pieces: list[list[Any]], coming: dict[str, Tensor]) -> Bucket:
        """The tensors that are whole with these pieces; the others stay in `coming`."""
        bucket: Bucket = []
        at = 0
        for name, kind, shape, first, n in pieces:
            if name not in coming:
                coming[name] = torch.empty(shape, dtype=getattr(torch, kind), device=buffer.device)
            data = coming[name].reshape(-1).view(torch.uint8)
            data[first : first + n] = buffer[at : at + n]
            at += n
            if first + n == len(data):
                bucket.append((name, coming.pop(name)))
        self.size += at
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)  # before the other side fills it again
        return bucket


class Link:
    """An engine's side, for as long as the run: the store, and the buffers or the group."""

    def __init__(self, how: str, offers: tuple[Offer, ...], receivers: int, timeout_s: float, device: torch.device) -> None:
        self.device, self.group = device, None
        if how == "nccl":
            self.line = Line(offers[0].address, offers[0].port, timeout_s)
            self.buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
            self.group = _group(self.line, self.line.store.add("engines", 1), 1 + receivers, device)
            return
        mine = [offer for offer in offers if (offer.host, offer.device) == (host(), name_of(device))]
        if not mine or (device.type == "cuda" and len(mine) > 1):
            raise SyncError(
                f"rollout.transport: ipc: {len(mine)} ranks of the policy are on this engine's {device.type} {name_of(device)} of {host()}, not one; "
                "give nccl, path or object_store"
            )
        self.line = Line(mine[0].address, mine[0].port, timeout_s)
        if len(mine) > 1 and (number := (self.line.store.add("engines", 1) - 1) % len(mine)):
            mine = mine[number:]
            self.line = Line(mine[0].address, mine[0].port, timeout_s)
        self.buffers = [_seen(lent, device) for lent in mine[0].lent]

    def receive(self, version: int, which: int, n: int) -> Tensor:
        buffer = self.buffers[which][:n]
        if self.group is not None:
            _broadcast(self.group, buffer, self.line, version)
        return buffer


@functools.cache
def _link(how: str, offers: tuple[Offer, ...], receivers: int, timeout_s: float, device: str) -> Link:
    return Link(how, offers, receivers, timeout_s, torch.device(device))


def name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


@functools.cache
def host() -> str:
    """This machine, as far as processes see each other's files: a container is one of its own."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _shared(device: torch.device) -> tuple[Tensor, Any]:
    """A buffer, and how another process of this machine sees it."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        return buffer, reduce_tensor(buffer)[1]
    fd = os.memfd_create("ptf-weights")  # gone with the last process that sees it, however that ends
    os.ftruncate(fd, BUFFER_BYTES)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    return torch.from_file(path, shared=True, size=BUFFER_BYTES, dtype=torch.uint8), path


def _seen(lent: Any, device: torch.device) -> Tensor:
    if device.type == "cuda":
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        where = list(lent)
        where[6] = device.index  # the same GPU has a number of its own in every process
        return rebuild_cuda_tensor(*where)
    return torch.from_file(lent, shared=True, size=BUFFER_BYTES, dtype=torch.uint8)


def _group(line: Line, rank: int, size: int, device: torch.device) -> Any:
    """Who broadcasts, and who is broadcast to: a process group that no other collective knows of."""
    store, timeout = dist.PrefixStore("group", line.store), timedelta(seconds=line.timeout_s)
    if device.type == "cuda":
        how = dist.ProcessGroupNCCL.Options()
        how._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, how)
    how = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:  # nothing is sent: this process's own address on the way to the policy
        towards.connect((line.store.host, line.store.port))
        own = towards.getsockname()[0]
    how._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]  # pyright: ignore[reportAttributeAccessIssue]
    how._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, how)


def _broadcast(group: Any, buffer: Tensor, line: Line, version: int) -> None:
    how = dist.BroadcastOptions()
    how.rootRank, how.rootTensor = 0, 0
    work = group.broadcast([buffer], how)
    line.wait(version, "a broadcast was not over", work.is_completed)  # one that the other side has left would last until the group's own deadline
    work.wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
