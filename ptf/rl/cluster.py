"""Roles and their processes: a `RoleGroup` is one role on its workers, and a `Cluster` starts groups and decides which
of them uses a pool's devices.

Markers determine how a method's arguments are dispatched. `@split_over_workers` splits the first argument (a list)
over the workers and joins the results in order. `@broadcast` calls every worker with the same arguments and returns
rank 0's result, `@summed_broadcast` the sum of all results, and `@largest_broadcast` the largest. `@replayed_broadcast`
is a broadcast that is repeated to a worker that replaces a lost one; `@unreplayable_broadcast` is one that cannot be
repeated. The same role class runs in this process (`LocalCluster`) or on Ray (`VerlCluster`) without a change. Roles of
one pool take turns on its devices; pools are independent.
"""

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from ptf.compute.meter import peak_memory_gib
from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from ptf.workspace import progress

F = TypeVar("F", bound=Callable)


def mark(method: F, **attributes: Any) -> F:
    """Mark how a group calls a method: by its `dispatch`."""
    vars(method).update(attributes)
    return method


broadcast = partial(mark, dispatch="broadcast")  # every worker with the same arguments; rank 0's result
summed_broadcast = partial(mark, dispatch="summed_broadcast")  # the same; the sum of their results
largest_broadcast = partial(mark, dispatch="largest_broadcast")  # the same; the largest of their results
replayed_broadcast = partial(mark, dispatch="replayed_broadcast")  # repeated to a replica that replaces a lost one
unreplayable_broadcast = partial(mark, dispatch="unreplayable_broadcast")  # a replica that dies then is not replaced


def split_over_workers(
    method: Callable | None = None, *, cost: Callable[[Any], float] = lambda item: 1.0, queued: bool = False
) -> Any:
    """Split the first argument, a list, over the data-parallel workers and join the lists that they return.

    Replicas get items of nearly the same total `cost`; with `queued`, for items that are computed one after the other,
    each replica takes the most expensive item that is left when it has ended its last one. Their method may be a
    generator of lists of (index in its list, result), in any order: results that arrived before a replica was lost are
    not computed again.
    """
    marked = partial(mark, dispatch="split", cost=cost, queued=queued)
    return marked(method) if method else marked


# what a broadcast returns of the results of all workers; without an entry, rank 0's
JOINED = {"summed_broadcast": sum, "largest_broadcast": max}
OnResult = Callable[[int, Any], None]  # takes the index of an item, and its result


class Role(ABC):
    """Base of the role classes; each worker makes one as `cls(world, settings)`."""

    uses_process_group: ClassVar[bool]  # True: its workers form one process group; False: they are independent replicas
    world: World

    @abstractmethod
    def offload(self) -> None:
        """Free the device memory, so that a different role can use the devices."""

    @abstractmethod
    def onload(self) -> None:
        """Move everything that `offload` moved away back to the device."""

    @largest_broadcast
    def peak_memory_gib(self) -> float:
        """Return the peak GPU memory of this role since the last call; without a GPU, the peak of the process's
        resident memory."""
        return peak_memory_gib(self.world.device)


@dataclass(frozen=True)
class Pool:
    """Devices that some roles share by taking turns."""

    name: str
    roles: frozenset[str]
    # how many processes share each slot: the first slots are used by all roles, the last by the largest role alone
    processes: tuple[int, ...]
    disk: bool = False  # True: offload to files, also on a CPU; False: offload to host memory, only with a GPU

    def __str__(self) -> str:
        return f"{self.name} ({len(self.processes)} × {', '.join(sorted(self.roles))})"


@dataclass(frozen=True)
class RoleSpec:
    """A role: its class, the settings that it is made from, and its workers. It is sent to the workers, so all of it
    can be pickled."""

    name: str
    cls: type
    settings: Any  # a frozen dataclass, of the type that the class takes
    # how its workers divide a model: those of one model group get the same part of a split argument. Independent
    # replicas are a model group each.
    mesh: MeshSizes = field(default_factory=MeshSizes)
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of its processes


class RoleGroup(Protocol):
    """One role on all of its workers, as the controller calls it."""

    spec: RoleSpec

    def call(self, method: str, *args: Any, on_result: OnResult | None = None) -> Any:
        """Call a method of the role on its workers, dispatched by the method's marker.

        `on_result` is called with the index and the result of each item as soon as it is there, from any thread, if the
        method yields its results; the call returns all of them. An error of a worker is raised here; RuntimeError, with
        role and method, if a worker died or the deadline passed.
        """
        ...


@dataclass
class PhaseRecord:
    """One phase of a step: a row of the table that the controller prints."""

    phase: str
    role: str
    pool: str
    workers: int
    seconds: float
    gib: float  # peak memory of the worker that used most
    start: float  # time.perf_counter() at its beginning
    # offloaded roles → GiB that each still uses on the device, for the worker that uses most
    offloaded: dict[str, float] = field(default_factory=dict)


class Cluster(ABC):
    """Starts role groups, and schedules them on their pools: it records which role is loaded in each pool, and the
    phases."""

    def __init__(self, pools: Sequence[Pool], gpu: bool) -> None:
        self.pools, self.gpu = pools, gpu  # gpu: whether the roles have GPUs
        self.offloading = {pool.name for pool in pools if gpu or pool.disk}  # whose waiting roles free their memory
        self.loaded: dict[str, Any] = {}  # pool → the group that uses its devices
        self.table: list[PhaseRecord] = []
        self.closing = contextlib.ExitStack()  # what ends the groups and their processes

    def start(self, spec: RoleSpec) -> RoleGroup:
        """Make the role in its pool; it then uses the pool's devices.

        Raises UserError if no pool has the role, or its pool is too small.
        """
        pool = self.pool(spec.name)
        self.free(pool)
        with progress.phase(f"start {spec.name}"):
            group = self.make_group(spec, pool)
        self.loaded[pool.name] = group
        return group

    @abstractmethod
    def make_group(self, spec: RoleSpec, pool: Pool) -> RoleGroup:
        """Return the role on its workers, whose devices are free."""

    def close(self) -> None:
        """End all groups and their processes."""
        self.closing.close()

    def pool(self, role: str) -> Pool:
        """Return the role's pool. Raises UserError if it has none."""
        for pool in self.pools:
            if role in pool.roles:
                return pool
        raise UserError(f"compute.pools: role {role} is in none of {', '.join(map(str, self.pools))}")

    def free(self, pool: Pool) -> dict[str, float]:
        """Offload the role that uses the pool. Return its name and the GiB that it still uses."""
        group = self.loaded.pop(pool.name, None)
        if group is None or pool.name not in self.offloading:
            return {}
        group.call("offload")
        return {group.spec.name: group.call("peak_memory_gib")}

    @contextlib.contextmanager
    def phase(self, group: Any, name: str) -> Iterator[None]:
        """Run a block in which `group` uses its pool's devices; other roles of the pool are offloaded first.

        The phase is added to `table`.
        """
        start = time.perf_counter()
        pool, offloaded = self.pool(group.spec.name), dict[str, float]()
        if self.loaded.get(pool.name) is not group:
            offloaded = self.free(pool)
            if pool.name in self.offloading:
                group.call("onload")
            self.loaded[pool.name] = group
        try:
            with progress.phase(name):
                yield
        finally:
            role, seconds = group.spec, time.perf_counter() - start
            record = PhaseRecord(name, role.name, pool.name, role.mesh.ranks, seconds, 0.0, start, offloaded)
            self.table.append(record)
        record.gib = group.call("peak_memory_gib")

    @contextlib.contextmanager
    def together(self, first: Any, second: Any, name: str) -> Iterator[None]:
        """Run a block in which both groups are loaded; afterwards only the second one is.

        If they share a pool, its devices must have memory for both.
        """
        pool = self.pool(second.spec.name)
        with self.phase(first, name):
            holder = self.loaded.get(pool.name)
            if holder is not second:
                if holder is not first:
                    self.free(pool)
                if pool.name in self.offloading:
                    second.call("onload")
            yield
        if self.loaded.get(pool.name) is first:
            self.free(pool)
        self.loaded[pool.name] = second


def phase_table(records: Sequence[PhaseRecord]) -> str:
    """Format phase, role, pool, workers, seconds and memory as a table of one line for each record."""
    rows = [("phase", "role", "pool", "workers", "seconds", "GiB", "offloaded")]
    for record in records:
        offloaded = ", ".join(f"{role} {gib:.2f} GiB" for role, gib in record.offloaded.items()) or "-"
        numbers = (str(record.workers), f"{record.seconds:.2f}", f"{record.gib:.2f}")
        rows.append((record.phase, record.role, record.pool, *numbers, offloaded))
    aligned = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


class LocalRoleGroup:
    """A role of one worker, in this process."""

    def __init__(self, spec: RoleSpec, world: World) -> None:
        if spec.mesh.ranks != 1:
            raise UserError(
                f"role {spec.name}: compute.launcher local runs one worker a role, but {spec.mesh.ranks} are "
                "configured; use launcher ray"
            )
        self.spec = spec
        self.role = spec.cls(world, spec.settings)

    def call(self, method: str, *args: Any, on_result: OnResult | None = None) -> Any:
        """See RoleGroup.call."""
        results = getattr(self.role, method)(*args)
        if not isinstance(results, Iterator):
            return results
        by_index = dict[int, Any]()
        for index, result in itertools.chain.from_iterable(results):
            by_index[index] = result
            if on_result:
                on_result(index, result)
        return [by_index[i] for i in range(len(by_index))]


class LocalCluster(Cluster):
    """All roles in this process. On a GPU, a role of a pool is offloaded while a different one is loaded."""

    def __init__(self, world: World, pools: Sequence[Pool]) -> None:
        super().__init__(pools, world.device.type == "cuda")
        self.world = world

    def make_group(self, spec: RoleSpec, pool: Pool) -> LocalRoleGroup:
        """See Cluster.make_group."""
        group = LocalRoleGroup(spec, self.world)
        if close := getattr(group.role, "close", None):  # of a role that starts processes
            self.closing.callback(close)
        return group
