"""Weights that go bucket by bucket from one process's memory to another's arrive as they were, whatever their sizes;
what arrives wrong is refused by the engine, whoever fails tells the other, and nobody waits for ever."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptf.errors import Lost
from ptf.rl.weights import nccl, streamed
from ptf.rl.weights.ipc import Ipc, opened
from ptf.rl.weights.nccl import Nccl
from ptf.rl.weights.streamed import Sender, Streamed, Transfer, TransferStore
from ptf.rl.weights.verification import Manifest, SyncError, check, checksum

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch) -> Iterator[None]:
    """Buffers of 128 bytes, so that tensors need several and several fit in one."""
    monkeypatch.setattr(streamed, "BUFFER_BYTES", 128)
    yield
    streamed._receiver.cache_clear()


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    return [(f"t{i}", torch.randn(shape, generator=generator).to(kinds[i % 3])) for i, shape in enumerate(shapes)]


def lent(
    sender: Sender, names: list[str], how: type[Streamed], version: int = 0, engines: int = 1, timeout_s: float = 20
) -> Transfer:
    return Transfer(how, version, frozenset(names), (sender.offer,), engines, timeout_s)


def engine(sent: Transfer) -> dict[str, torch.Tensor]:
    with sent.reporting_failure():
        return {name: tensor for bucket in sent for name, tensor in bucket}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=9),
    st.sampled_from([Ipc, Nccl]),
)
def test_every_tensor_arrives_as_it_was(shapes, how):
    streamed._receiver.cache_clear()
    sender, given = how.sender(CPU, 1, 20), tensors(*shapes)
    with ThreadPoolExecutor(1) as beside:
        for version in (0, 1, 2):
            now = [(name, t + version) for name, t in given]
            sending = beside.submit(sender.send, version, now)
            found = engine(lent(sender, [name for name, _ in now], how, version))
            sending.result()
            assert found.keys() == dict(now).keys()
            assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in now)


def test_several_engines_are_all_waited_for():
    sender, given = Nccl.sender(CPU, 3, 20), tensors(*SHAPES)
    # a link of its own for each
    sent = [Transfer(Nccl, 0, frozenset(dict(given)), (sender.offer,), 3, 20, f"cpu:{i}") for i in range(3)]
    with ThreadPoolExecutor(4) as beside:
        sending = beside.submit(sender.send, 0, given)
        founds = [one.result() for one in [beside.submit(engine, each) for each in sent]]
        sending.result()
    assert all(torch.equal(found[name], t) for found in founds for name, t in given)


@pytest.mark.parametrize(
    "change", ["a bit", "two words change places", "two words that differ in a sign change places", "the last byte"]
)
def test_a_checksum_sees(change):
    data = torch.randint(0, 256, (128,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if "sign" in change:
        data[64:72] = data[:8]
        data[71] ^= 128
    other = data.clone()
    if change == "a bit":
        other[17] ^= 64
    elif change == "the last byte":
        other[-1] += 1
    else:
        other[:8], other[64:72] = data[64:72], data[:8]
    assert checksum(other) != checksum(data)
    assert checksum(data.clone()) == checksum(data)


class Bending:
    """A sender's store, with which the second part changes in memory after it was summed up."""

    def __init__(self, sender: Sender) -> None:
        self.sender, self.store = sender, sender.store.store

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def set(self, key: str, value: str) -> None:
        if key == "0/1":
            self.sender.buffers[1][3] ^= 1
        self.store.set(key, value)


WRONG: dict[str, tuple[Callable[[list], list], str]] = {
    "one is missing": (lambda sent: sent[1:], "did not arrive: .'t0'"),
    "one comes twice": (lambda sent: [*sent, sent[0]], "t0 arrived twice"),
    "one is not announced": (lambda sent: [*sent, ("t9", torch.ones(3))], "t9 was not announced"),
}


def refused(sender: Sender, sent: Iterable, how: type[Streamed], said: str, told: str, read: Callable = engine) -> None:
    """The engine refuses what is sent to it, saying so, and the policy is told."""
    with ThreadPoolExecutor(1) as beside:
        sending = beside.submit(sender.send, 0, sent)
        with pytest.raises(SyncError, match=said):
            read(lent(sender, ["t0", "t1", "t2"], how))
        with pytest.raises(Exception, match=told):
            sending.result()


SHAPES = (40,), (7, 5), (3,)


@pytest.mark.parametrize("how", [Ipc, Nccl])
@pytest.mark.parametrize("fault", WRONG)
def test_what_arrives_wrong_is_refused_and_the_policy_is_told(fault, how):
    change, said = WRONG[fault]
    told = "the other side failed: SyncError: weight sync 0"
    refused(how.sender(CPU, 1, 20), change(tensors(*SHAPES)), how, said, told)


def test_memory_that_changes_before_it_is_read_is_refused():
    sender = Ipc.sender(CPU, 1, 20)
    sender.store.store = Bending(sender)
    refused(sender, tensors(*SHAPES), Ipc, "part 1 arrived changed", "the other side failed")


def test_what_is_broadcast_wrong_is_refused(monkeypatch):
    """The engine's copy changes on the way."""
    receive = nccl.NcclReceiver.receive

    def bent(self, *what):
        buffer = receive(self, *what)
        buffer[3] ^= 1
        return buffer

    monkeypatch.setattr(nccl.NcclReceiver, "receive", bent)
    refused(Nccl.sender(CPU, 1, 20), tensors(*SHAPES), Nccl, "part 0 arrived changed", "the other side failed")


def test_a_version_that_was_lost_or_repeated_is_refused_before_anything_is_read():
    sender = Ipc.sender(CPU, 1, 20)
    with pytest.raises(SyncError, match="version 2 was sent, but the engine holds 2"):
        check(lent(sender, ["t0"], Ipc, 2), Manifest(2, {"t0": ""}), current=2)


def test_a_policy_that_fails_half_way_ends_the_engines_wait():
    def breaking():
        yield from tensors((40,), (40,))
        raise ValueError("a shard is gone")

    sender = Ipc.sender(CPU, 1, 60)
    with ThreadPoolExecutor(1) as beside:
        sending = beside.submit(sender.send, 0, breaking())
        with pytest.raises(SyncError, match="the other side failed: ValueError: a shard is gone"):
            engine(lent(sender, ["t0", "t1"], Ipc, timeout_s=60))
        with pytest.raises(ValueError, match="a shard is gone"):
            sending.result()


def test_nobody_waits_longer_than_the_deadline():
    sender = Ipc.sender(CPU, 1, 0.5)
    with pytest.raises(TimeoutError, match="1 engines had not all read part"):
        sender.send(0, tensors((40,), (40,), (40,), (40,)))
    other = Ipc.sender(CPU, 1, 0.5)
    with pytest.raises(TimeoutError, match="the policy had not sent part 0"):
        engine(lent(other, ["t0"], Ipc, timeout_s=0.5))


LISTENS = """
import torch, sys
from ptf.rl.weights.ipc import Ipc
sender = Ipc.sender(torch.device("cpu"), 1, 60)
sender.buffers[0][:5] = torch.tensor(list(b"hello"), dtype=torch.uint8)
print(sender.offer.handles[0], flush=True)
sys.stdin.read()
"""


def test_memory_is_seen_by_another_process_and_is_gone_with_it(monkeypatch):
    monkeypatch.setattr(streamed, "BUFFER_BYTES", 64 << 20)
    other = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout
    try:
        path = other.stdout.readline().strip()
        assert bytes(opened(path, CPU)[:5].tolist()) == b"hello"
    finally:
        other.kill()
        other.wait(30)
    with pytest.raises(RuntimeError):
        opened(path, CPU)


def test_what_was_said_is_forgotten_when_it_was_read():
    sender, given = Ipc.sender(CPU, 1, 20), tensors(*SHAPES)
    keys = []
    with ThreadPoolExecutor(1) as beside:
        for version in range(4):
            sending = beside.submit(sender.send, version, given)
            engine(lent(sender, ["t0", "t1", "t2"], Ipc, version))
            sending.result()
            keys.append(sender.store.store.num_keys())
    assert keys[1:] == keys[:1] * 3


def stops_early(sent: Transfer) -> None:
    with sent.reporting_failure():
        next(iter(sent))
        sent.raise_if_incomplete()


def test_an_engine_that_stops_reading_is_refused():
    said = "the engine stopped reading before all tensors had arrived"
    told = "the other side failed: SyncError: weight sync 0: the engine stopped reading"
    refused(Ipc.sender(CPU, 1, 2), tensors(*SHAPES), Ipc, said, told, stops_early)


def test_an_engine_takes_what_is_on_its_own_machine():
    """Whatever is offered elsewhere, and first."""
    sender, given = Ipc.sender(CPU, 1, 20), tensors((9,))
    elsewhere = replace(sender.offer, host="another", port=1)
    sent = Transfer(Ipc, 0, frozenset(["t0"]), (elsewhere, sender.offer), 1, 20)
    with ThreadPoolExecutor(1) as beside:
        sending = beside.submit(sender.send, 0, given)
        assert torch.equal(engine(sent)["t0"], given[0][1])
        sending.result()
    with pytest.raises(SyncError, match="0 ranks of the policy are on this engine's cpu"):
        engine(Transfer(Ipc, 1, frozenset(["t0"]), (elsewhere,), 1, 20))


@pytest.mark.parametrize("how", [Ipc, Nccl])
def test_listening_is_on_the_given_address_alone(how, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    sender = how.sender(CPU, 1, 5)
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
        if line.split()[3] == "0A"
    ]
    assert [address for address in listening if int(address.split(":")[1], 16) == sender.offer.port] == [
        f"0100007F:{sender.offer.port:04X}"
    ]


def test_a_wait_looks_for_the_other_sides_failure_again_and_again():
    sender = Ipc.sender(CPU, 1, 30)
    line = TransferStore(sender.offer.address, sender.offer.port, 30)
    threading.Timer(0.3, lambda: line.store.set("7/fault", "RuntimeError: out of memory")).start()
    began = time.monotonic()
    with pytest.raises(SyncError, match="out of memory"):
        sender.store.wait(7, "nothing", lambda: False)
    assert time.monotonic() - began < 30


class Side:
    """A role group whose call returns or raises what it is given."""

    def __init__(self, result: object) -> None:
        self.result = result

    def call(self, method: str, *arguments: object) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return method, self.result


@pytest.mark.parametrize(
    ("policy", "rollout", "expected"),
    [
        (ValueError("sent wrongly"), streamed.PeerFailed("the policy failed"), "sent wrongly"),
        (streamed.PeerFailed("an engine failed"), ValueError("received wrongly"), "received wrongly"),
        (Lost("the policy died"), ValueError("what came of it"), "the policy died"),
        (None, ValueError("received wrongly"), "received wrongly"),
        (ValueError("sent wrongly"), None, "sent wrongly"),
    ],
)
def test_of_two_failures_the_cause_is_raised(policy, rollout, expected) -> None:
    with pytest.raises(Exception, match=expected):
        streamed.send_and_receive(Side(policy), Side(rollout), SimpleNamespace(version=3), None)  # type: ignore[arg-type]


def test_what_the_engines_acknowledge_is_returned() -> None:
    found = streamed.send_and_receive(Side(None), Side(7), SimpleNamespace(version=3), None)  # type: ignore[arg-type]
    assert found == ("receive", 7)
