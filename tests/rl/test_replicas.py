"""Replicas: work is dealt by its cost; one that is lost is replaced, gets the replayed broadcasts,
and computes only the missing results."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.errors import Lost, Retryable, UserError
from ptf.rl.cluster import (
    LocalCluster,
    Pool,
    RoleSpec,
    broadcast,
    replayed_broadcast,
    split_over_workers,
    summed_broadcast,
    unreplayable_broadcast,
)
from ptf.rl.ray_cluster import VerlCluster
from ptf.rl.replicas import Replicas, by_cost
from ptf.rl.sampler import Sampler
from ptf.rl.weights.verification import SyncError


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 6))
def test_parts_have_nearly_the_same_cost(costs, parts):
    shares = by_cost(costs, parts, float)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    sums = [sum(costs[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs, default=0)


class Worker:
    """Squares numbers. The first time that it gets the name of a file, a fault happens in the middle of the call."""

    uses_process_group: ClassVar[bool] = False

    def __init__(self, world: World, place: str) -> None:
        self.place, self.weights, self.count = Path(place), -1, 0

    @replayed_broadcast
    def load(self, weights: int, fault: str = "nothing") -> int:
        """Load a version of weights, as an engine does: each version once, and none left out."""
        if fault != "nothing":
            self.go_wrong(fault)
        assert self.weights in (-1, weights - 1), f"{weights} after {self.weights}"
        self.weights = weights
        return weights

    @unreplayable_broadcast
    def receive(self, weights: int) -> int:
        self.weights = weights
        return weights

    @broadcast
    def pid(self) -> int:
        return os.getpid()

    @summed_broadcast
    def take_count(self) -> int:
        count, self.count = self.count, 0
        return count

    @split_over_workers(cost=float)
    def squares(self, items: list[int], fault: str) -> Iterator[list[tuple[int, tuple[int, int]]]]:
        self.count += len(items)
        for i in reversed(range(len(items))):
            with open(self.place / f"asked-{items[i]}", "a") as file:
                file.write(f"{self.weights}\n")
            if items[i] == 3:
                self.go_wrong(fault)
            yield [(i, (items[i] ** 2, self.weights))]

    def go_wrong(self, fault: str) -> None:
        mark = self.place / fault
        if mark.exists() and not fault.startswith("always"):
            return
        mark.touch()
        time.sleep(1.5)  # what was given before is on its way
        if "raise" in fault:
            raise RuntimeError("the engine is out of order")
        if fault == "refuse":
            raise UserError("the config is wrong")
        if fault == "late":
            raise TimeoutError("too many answers for one step")
        if fault != "nothing":
            os.kill(os.getpid(), getattr(signal, fault))
            time.sleep(1)

    def offload(self) -> None:
        self.asleep = True

    def onload(self) -> None:
        self.asleep = False

    @split_over_workers
    def state(self, items: list[int], fault: str) -> list[tuple[int, bool]]:
        if fault != "nothing":
            self.go_wrong(fault)
        return [(self.weights, getattr(self, "asleep", False))] * len(items)

    @broadcast
    def peak_memory_gib(self) -> float:
        return 0.5


SPEC = ("workers", Worker)
ITEMS = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def group(ray_cluster, tmp_path):
    cluster = VerlCluster(device="cpu", timeout_s=60, pools=[Pool("all", frozenset({"workers"}), (1, 1))], restarts=1)
    made = cluster.start(RoleSpec(*SPEC, str(tmp_path), MeshSizes(replicate=2)))
    made.call("load", 7)
    yield made
    cluster.close()


@pytest.mark.long
@pytest.mark.ray
def test_a_count_is_summed_over_the_replicas(group):
    group.call("squares", ITEMS, "nothing")
    assert group.call("take_count") == len(ITEMS)
    assert group.call("take_count") == 0


def test_the_retries_of_environments_are_summed_over_the_replicas():
    assert Sampler.take_retries.dispatch == "summed_broadcast"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("raise", marks=pytest.mark.cluster)])
def test_one_that_is_lost_is_replaced_and_asked_for_the_rest_alone(group, tmp_path, capsys, fault):
    before = [gang.members[0].pid for gang in group.gangs]
    assert group.call("squares", ITEMS, fault) == [(i * i, 7) for i in ITEMS]
    after = [gang.members[0].pid for gang in group.gangs]
    asked = {i: (tmp_path / f"asked-{i}").read_text().split() for i in ITEMS}
    broken = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    assert after[1 - broken] == before[1 - broken], "the other goes on"
    assert asked[3] == ["7", "7"], "by its successor with the same weights"
    assert [i for i in ITEMS if len(asked[i]) > 1] == [3], "what was given before is kept"
    said = capsys.readouterr().out
    assert f"workers replica {broken} failed at squares and is replaced; 2 of its 4 items are computed again: " in said
    assert ("died while doing workers.squares" if fault == "SIGKILL" else "the engine is out of order") in said


@pytest.mark.long
@pytest.mark.ray
def test_one_that_was_told_what_cannot_be_said_again_has_no_successor(group, tmp_path):
    assert group.call("receive", 8) == 8
    before = [gang.members[0].pid for gang in group.gangs]
    with pytest.raises(
        Lost, match=r"workers replica \d failed at squares, and this rollout\.transport cannot send the weights"
    ):
        group.call("squares", ITEMS, "raise")
    assert [gang.members[0].pid for gang in group.gangs] == before


@pytest.mark.ray
@pytest.mark.cluster
def test_one_that_always_fails_is_named_and_a_wrong_config_is_not_tried_again(group, tmp_path):
    with pytest.raises(
        Retryable,
        match=r"workers replica \d failed at squares, 2 times: (?s:.*)the engine is out of order\nraised in workers \d "
        r"rank 0",
    ):
        group.call("squares", ITEMS, "always raise")
    assert len((tmp_path / "asked-3").read_text().split()) == 2
    with pytest.raises(UserError, match="the config is wrong"):
        group.call("squares", ITEMS, "refuse")
    assert len((tmp_path / "asked-3").read_text().split()) == 3
    with pytest.raises(TimeoutError, match="too many answers"):
        group.call("squares", ITEMS, "late")
    assert len((tmp_path / "asked-3").read_text().split()) == 4


@pytest.mark.ray
@pytest.mark.cluster
def test_one_that_dies_at_a_sync_or_before_it_or_offloaded_is_as_the_others_afterwards(group):
    assert group.call("load", 8, "SIGKILL") == 8
    os.kill(group.gangs[1].members[0].pid, signal.SIGKILL)
    assert group.call("load", 9) == 9
    assert group.call("state", [1, 2], "nothing") == [(9, False)] * 2
    group.call("offload")
    os.kill(group.gangs[0].members[0].pid, signal.SIGKILL)
    group.call("peak_memory_gib")
    assert group.call("state", [1, 2], "nothing") == [(9, True)] * 2, (
        "its successor gives no memory away that others have"
    )


@pytest.mark.ray
@pytest.mark.cluster
def test_a_successor_that_does_not_start_has_one_too(group, monkeypatch):
    start, failures = group.start_gang, iter([True, False])
    group.restarts = 2
    group.start_gang = lambda i: (_ for _ in ()).throw(RuntimeError("no memory yet")) if next(failures) else start(i)
    assert group.call("squares", ITEMS, "raise") == [(i * i, 7) for i in ITEMS]


@pytest.mark.ray
@pytest.mark.cluster
def test_one_that_was_stopped_is_named_within_10_seconds_and_replaced(group, capsys):
    for gang in group.gangs:
        gang.silent_s = 9.0
    assert group.call("squares", ITEMS, "SIGSTOP") == [(i * i, 7) for i in ITEMS]
    said = capsys.readouterr().out
    assert "has not answered for" in said
    assert "sent no heartbeat for" in said, "replaced for its silence, not at the deadline"


def test_in_this_process_the_results_come_in_order_too(tmp_path):
    local = LocalCluster(World(), [Pool("all", frozenset({"workers"}), (1,))]).start(RoleSpec(*SPEC, str(tmp_path)))
    assert local.call("load", 3) == 3
    assert local.call("squares", ITEMS, "nothing") == [(i * i, 3) for i in ITEMS]


class Engine:
    """Has weights of a version, which must be what a canary was computed with."""

    version = 0

    def close(self) -> None: ...

    @replayed_broadcast
    def load(self, version: int) -> None:
        self.version = version

    @replayed_broadcast
    def canary(self, version: int) -> None:
        if self.version != version:
            raise SyncError(f"the canary is of {version}, the weights are of {self.version}")


def test_one_that_dies_at_a_canary_gets_the_weights_and_not_the_canary_of_those_before(monkeypatch):
    monkeypatch.setattr("ptf.rl.replicas.put", lambda value: value)  # without Ray
    replicas: Any = Replicas.__new__(Replicas)
    lost = iter([False, False, False, True, False, False])

    def start(i: int) -> None:
        replicas.gangs[i] = Engine()

    def ask(gang: Any, method: str, shared: tuple = ()) -> None:
        if next(lost, False):
            raise RuntimeError("the engine died")
        getattr(gang, method)(*shared)

    replicas.gangs, replicas.threads, replicas.count = [SimpleNamespace(close=lambda: None)], ThreadPoolExecutor(1), 1
    replicas.spec, replicas.closed, replicas.restarts = SimpleNamespace(cls=Engine, name="engines"), False, 1
    replicas.replayed, replicas.offloaded, replicas.irreplaceable = {}, False, False
    replicas._start, replicas._ask, replicas._name = start, ask, lambda i: "engine"
    start(0)
    for version in (1, 2):
        replicas.call("load", version)
        replicas.call("canary", version)
    assert replicas.gangs[0].version == 2
    assert not next(lost, False), "the engine died, and its successor was asked"


def test_what_fails_after_the_end_has_no_successor():
    replicas = Replicas.__new__(Replicas)
    gang = SimpleNamespace(close=lambda: None)
    replicas.gangs, replicas.threads, replicas.closed, replicas.restarts = [gang], ThreadPoolExecutor(1), False, 3
    asked = []

    def ask(gang):
        asked.append(gang)
        raise RuntimeError("the process died")

    replicas.close()
    with pytest.raises(RuntimeError, match="the process died"):
        replicas._with_restarts(0, "a method", ask)
    assert asked == [gang]
    with pytest.raises(RuntimeError, match="after shutdown"):
        replicas.threads.submit(print)


@pytest.mark.parametrize("method", ["receive", "pid"])
def test_an_error_is_raised_at_once_where_replicas_wait_for_each_other(method):
    """Replica 1 ends only after the error of replica 0 has been raised, or, for a broadcast that waits for all, after
    it has not been raised for a while."""
    replicas, raised = Replicas.__new__(Replicas), threading.Event()
    replicas.spec, replicas.count, replicas.restarts = SimpleNamespace(name="a role", cls=Worker), 2, 0
    replicas.threads, replicas.closed, replicas.irreplaceable = ThreadPoolExecutor(2), False, False
    waited = list[bool]()

    class Member:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def invoke(self, name, arguments, doing):
            if self.fails:
                raise RuntimeError("the process died")
            waited.append(raised.wait(0.5))
            return [None]

    replicas.gangs = [Member(True), Member(False)]
    with pytest.raises(RuntimeError, match="the process died"):
        replicas.call(method)
    raised.set()
    replicas.threads.shutdown()
    assert waited == [method == "receive"]


def test_a_successor_is_asked_for_the_rest_alone():
    replicas = Replicas.__new__(Replicas)
    replicas.spec = SimpleNamespace(name="a role")
    asked = []

    class Answering:
        def stream(self, method, arguments, doing):
            asked.append((arguments[1], arguments[2:], doing))
            items = arguments[1]
            yield [(which, item * 10) for which, item in enumerate(items[:2])]  # two that came together
            if len(asked) == 1:
                raise RuntimeError("the process died")
            yield [(which, item * 10) for which, item in enumerate(items[2:], 2)]

    def twice(i, method, ask, progress):
        with pytest.raises(RuntimeError):
            ask(Answering())
        assert progress() == "; 1 of its 3 items are computed again"
        ask(Answering())

    replicas._with_restarts = twice
    assert replicas._part(0, "squares", [5, 6, 7, 8], [3, 0, 2], ["shared"], None) == {3: 80, 0: 50, 2: 70}
    assert asked == [([8, 5, 7], ("shared",), "a role.squares"), ([7], ("shared",), "a role.squares")]


class Pace:
    """A gang that computes squares at its own pace, and fails once at an item."""

    def __init__(self, name: int, seconds: float, fails_at: int | None = None) -> None:
        self.name, self.seconds, self.fails_at, self.asked = name, seconds, fails_at, list[int]()

    def stream(self, name: str, arguments: tuple, doing: str) -> Iterator[tuple[int, tuple[int, int]]]:
        _, items = arguments
        self.asked += items
        for i, item in enumerate(items):
            time.sleep(self.seconds)
            if item == self.fails_at:
                self.fails_at = None
                raise RuntimeError("the engine is out of order")
            yield [(i, (item * item, self.name))]

    def close(self) -> None:
        pass


class Queued:
    @split_over_workers(cost=float, queued=True)
    def squares(self, items: list[int]) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_replicas_take_queued_items_as_they_end_others(fails):
    replicas = Replicas.__new__(Replicas)
    replicas.spec, replicas.count, replicas.closed = SimpleNamespace(name="a role", cls=Queued), 2, False
    replicas.restarts, replicas.irreplaceable, replicas.offloaded, replicas.replayed = 1, False, False, {}
    slow, fast = Pace(0, 0.3), Pace(1, 0.01, fails_at=5 if fails else None)
    replicas.gangs, replicas.threads = [slow, fast], ThreadPoolExecutor(2)
    replicas.start_gang = lambda i: (slow, fast)[i]
    replicas._start = lambda i: ""
    found = replicas.call("squares", ITEMS)
    assert [square for square, _ in found] == [i * i for i in ITEMS]
    assert len(slow.asked) <= 2, "the other took what it would have waited for"
    assert sorted(slow.asked + fast.asked) == sorted(ITEMS + [5] * fails)
    assert 8 in (slow.asked[0], fast.asked[0]), "the most expensive first"
    replicas.threads.shutdown()
