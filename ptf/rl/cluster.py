"""Roles and where they live: `RoleGroup` is one role on its workers, `Cluster` makes groups and says whose turn it is.

The one idea: two markers say how a method's arguments travel. `@sharded` splits the first argument (a list) over the workers and joins
the results in order; `@everywhere` calls every worker with the same arguments and returns rank 0's result. The same role class then runs
in this process (`LocalCluster`) or on Ray (`VerlCluster`) without knowing.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from ptf.compute.world import World
from ptf.errors import UserError

F = TypeVar("F", bound=Callable)


def sharded(method: F) -> F:
    """Split the first argument, a list, over the data-parallel workers; join the lists they return."""
    method.dispatch = "sharded"  # type: ignore[attr-defined]
    return method


def everywhere(method: F) -> F:
    """Same arguments on every worker; rank 0's result."""
    method.dispatch = "everywhere"  # type: ignore[attr-defined]
    return method


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
        """Memory this role holds now: on the GPU, or resident where there is none."""
        ...


@dataclass(frozen=True)
class RoleSpec:
    """What a role is made of: plain values that travel to the workers."""

    name: str
    cls: type
    kwargs: Mapping[str, Any]
    workers: int = 1
    env: Mapping[str, str] = field(default_factory=dict)  # environment of its processes
    replicate: int = 1  # copies of its sharded model, where its workers form a process group
    tensor: int = 1  # neighbours who hold one model's layers together: they get the same part of a sharded argument


class RoleGroup(Protocol):
    spec: RoleSpec

    def call(self, method: str, *args: Any) -> Any:
        """Dispatch by the method's marker. Errors of a worker are raised here; RuntimeError with role and method when one died or the deadline passed."""
        ...

    def where(self) -> list[str]:
        """One description a worker, for the log: process id and actor id."""
        ...


class Cluster(Protocol):
    def start(self, spec: RoleSpec) -> RoleGroup: ...
    def phase(self, group: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """It is `group`'s turn: it wakes, roles on the same devices are parked. The seconds are added to `seconds[name]`."""
        ...

    seconds: dict[str, float]

    def close(self) -> None: ...


class LocalGroup:
    """A role of one worker, in this process."""

    def __init__(self, spec: RoleSpec, world: World) -> None:
        if spec.workers != 1:
            raise UserError(f"role {spec.name}: compute.launcher local has one worker; {spec.workers} were asked for")
        self.spec = spec
        self.role = spec.cls(world, **spec.kwargs)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.role, method)(*args)

    def where(self) -> list[str]:
        return ["in this process"]


class LocalCluster:
    """All roles in this process; they take turns on its device."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: list[LocalGroup] = []
        self.awake: LocalGroup | None = None
        self.seconds: dict[str, float] = {}

    def start(self, spec: RoleSpec) -> LocalGroup:
        if self.awake:
            self.awake.role.park()
        group = LocalGroup(spec, self.world)
        self.groups.append(group)
        self.awake = group
        return group

    @contextlib.contextmanager
    def phase(self, group: LocalGroup, name: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.awake is not group:
            if self.awake:
                self.awake.role.park()
            group.role.wake()
            self.awake = group
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def close(self) -> None:
        self.groups.clear()
