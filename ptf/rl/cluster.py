"""Roles and where they live: `RoleGroup` is one role on its workers, `Cluster` makes groups and says whose turn it is.

The one idea: markers say how a method's arguments travel. `@sharded` splits the first argument (a list) over the workers and joins the results in
order; `@everywhere` calls every worker with the same arguments and returns rank 0's result; `@lasting` is that for what a worker that starts later has
to be told too, `@once` for what it cannot be told. The same role class then runs in this process (`LocalCluster`) or on Ray (`VerlCluster`) without
knowing. Roles of one pool take turns; pools do not know of each other.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from ptf.compute.world import World
from ptf.errors import UserError

F = TypeVar("F", bound=Callable)


def sharded(method: Callable | None = None, *, cost: Callable[[Any], float] = lambda item: 1.0) -> Any:
    """Split the first argument, a list, over the data-parallel workers; join the lists that they return. Replicas get items of nearly the same `cost`,
    and their method may be a generator of (number in its list, result) in any order: what was given before a replica is lost is not asked for again."""

    def marked(method: F) -> F:
        method.dispatch, method.cost = "sharded", cost  # type: ignore[attr-defined]
        return method

    return marked(method) if method else marked


def everywhere(method: F) -> F:
    """Same arguments on every worker; rank 0's result."""
    method.dispatch = "everywhere"  # type: ignore[attr-defined]
    return method


def lasting(method: F) -> F:
    """As `everywhere`; a replica that takes the place of a lost one gets the last such call again."""
    method.dispatch = "lasting"  # type: ignore[attr-defined]
    return method


def once(method: F) -> F:
    """As `everywhere`, of what cannot be said again: a replica that is lost afterwards has no successor."""
    method.dispatch = "once"  # type: ignore[attr-defined]
    return method


def in_order(results: Any) -> Any:
    """A list, of what a generator gave in any order; anything else as it is."""
    if not isinstance(results, Iterator):
        return results
    found = dict(results)
    return [found[i] for i in range(len(found))]


def split(items: list, parts: int) -> list[list]:
    """Contiguous parts whose sizes differ by at most one."""
    size, rest = divmod(len(items), parts)
    starts = [i * size + min(i, rest) for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(starts)]


class Role(Protocol):
    """Made on each worker as `cls(world, **kwargs)`."""

    distributed: ClassVar[bool]  # True: its workers form one process group; False: they are independent replicas

    def park(self) -> None:
        """Another role takes the devices: give back their memory."""
        ...

    def wake(self) -> None: ...

    def memory_gib(self) -> float:
        """The most memory that this role held on the GPU since it was asked last; resident now where there is none."""
        ...


@dataclass(frozen=True)
class Pool:
    """Devices that some roles share by turns."""

    name: str
    roles: frozenset[str]
    processes: tuple[int, ...]  # for how many there is room on each of its places: first those of all roles, last those of the largest alone
    disk: bool = False  # those who wait do so in files, on a CPU too; else in host memory, where there is a GPU

    @property
    def workers(self) -> int:
        """Of its largest role."""
        return len(self.processes)

    def __str__(self) -> str:
        return f"{self.name} ({self.workers} × {', '.join(sorted(self.roles))})"


@dataclass(frozen=True)
class RoleSpec:
    """What a role is made of: plain values that travel to the workers."""

    name: str
    cls: type
    kwargs: Mapping[str, Any]
    workers: int = 1
    env: Mapping[str, str] = field(default_factory=dict)  # environment of its processes
    replicate: int = 1  # copies of its sharded model, where its workers form a process group
    tensor: int = 1  # neighbours who hold one model's layers together: they get the same part of a sharded argument; of a replica, its places


class RoleGroup(Protocol):
    spec: RoleSpec

    def call(self, method: str, *args: Any) -> Any:
        """Dispatch by the method's marker. Errors of a worker are raised here; RuntimeError with role and method when one died or the deadline passed."""
        ...

    def memory(self) -> list[float]:
        """As Role.memory_gib, of each worker."""
        ...

    def where(self) -> list[str]:
        """One description a worker, for the log: process id and actor id."""
        ...


@dataclass
class Turn:
    """What one phase of a step was: a row of the table that the controller prints."""

    phase: str
    role: str
    pool: str
    workers: int
    seconds: float
    gib: float  # of the worker that held most
    parked: dict[str, float] = field(default_factory=dict)  # roles that gave way → GiB that each still held, of the worker that held most


class Turns:
    """Whose turn it is in each pool, and what each phase took."""

    def __init__(self, pools: Sequence[Pool], gpu: bool) -> None:
        self.pools, self.gpu = pools, gpu
        self.groups: list[Any] = []
        self.awake: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.table: list[Turn] = []

    def pool(self, role: str) -> Pool:
        """Raises UserError if the role has none."""
        for pool in self.pools:
            if role in pool.roles:
                return pool
        raise UserError(f"compute.pools: role {role} is in none of {', '.join(map(str, self.pools))}")

    def parks(self, pool: Pool) -> bool:
        """Whether those who wait give their memory back."""
        return self.gpu or pool.disk

    def room(self, pool: Pool) -> dict[str, float]:
        """Park whoever holds the pool. Returns what it still holds, in GiB."""
        group = self.awake.pop(pool.name, None)
        if group is None or not self.parks(pool):
            return {}
        group.call("park")
        return {group.spec.name: max(group.memory())}

    @contextlib.contextmanager
    def phase(self, group: Any, name: str) -> Iterator[None]:
        """It is `group`'s turn: it wakes, roles of the same pool are parked. The seconds are added to `seconds[name]`."""
        start, pool, parked = time.perf_counter(), self.pool(group.spec.name), dict[str, float]()
        if self.awake.get(pool.name) is not group:
            parked = self.room(pool)
            if self.parks(pool):
                group.call("wake")
            self.awake[pool.name] = group
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.table.append(Turn(name, group.spec.name, pool.name, group.spec.workers, spent, 0.0, parked))
        self.table[-1].gib = max(group.memory())

    @contextlib.contextmanager
    def together(self, first: Any, second: Any, name: str) -> Iterator[None]:
        """Both are awake: where they share a pool there must be room for both, and it is then the second's turn."""
        pool = self.pool(second.spec.name)
        with self.phase(first, name):
            held = self.awake.get(pool.name)
            if held is not second:
                if held is not first:
                    self.room(pool)
                if self.parks(pool):
                    second.call("wake")
            yield
        if self.awake.get(pool.name) is first:
            self.room(pool)
        self.awake[pool.name] = second


def table(turns: Sequence[Turn]) -> str:
    """Phase × role × pool × memory × seconds, one line each; equal phases one after the other are one."""
    rows = [("phase", "role", "pool", "workers", "seconds", "GiB", "parked")]
    for turn in turns:
        gone = ", ".join(f"{role} {gib:.2f} GiB" for role, gib in turn.parked.items()) or "-"
        rows.append((turn.phase, turn.role, turn.pool, str(turn.workers), f"{turn.seconds:.2f}", f"{turn.gib:.2f}", gone))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


class Cluster(Protocol):
    seconds: dict[str, float]
    table: list[Turn]

    def start(self, spec: RoleSpec) -> RoleGroup:
        """Make the role in its pool, where it is awake afterwards. Raises UserError if no pool has it, or its pool is too small."""
        ...

    def phase(self, group: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """As Turns.phase."""
        ...

    def together(self, first: Any, second: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """As Turns.together."""
        ...

    def close(self) -> None: ...


class LocalGroup:
    """A role of one worker, in this process."""

    def __init__(self, spec: RoleSpec, world: World) -> None:
        if spec.workers != 1:
            raise UserError(f"role {spec.name}: compute.launcher local has one worker; {spec.workers} were asked for")
        self.spec = spec
        self.role = spec.cls(world, **spec.kwargs)

    def call(self, method: str, *args: Any) -> Any:
        return in_order(getattr(self.role, method)(*args))

    def memory(self) -> list[float]:
        return [self.role.memory_gib()]

    def where(self) -> list[str]:
        return ["in this process"]


class LocalCluster(Turns):
    """All roles in this process. On a GPU they give way to each other, unless their pools differ."""

    def __init__(self, world: World, pools: Sequence[Pool]) -> None:
        super().__init__(pools, world.device.type == "cuda")
        self.world = world

    def start(self, spec: RoleSpec) -> LocalGroup:
        pool = self.pool(spec.name)
        self.room(pool)
        group = LocalGroup(spec, self.world)
        self.groups.append(group)
        self.awake[pool.name] = group
        return group

    def close(self) -> None:
        self.groups.clear()
        self.awake.clear()
