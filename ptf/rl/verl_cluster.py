"""Roles on Ray: the `Cluster` protocol on gangs of verl's workers, one gang a role, each process with its own environment.

The one idea: a pool is a set of reserved places, and each of its roles has one process on as many of them as it needs. Where the pool parks,
whoever is awake gives its memory back before another wakes.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptf.compute.gang import Gang, Rank, gpus, make_pool, part_of, release, share
from ptf.compute.heartbeat import beating
from ptf.compute.world import World, joined, pick_device
from ptf.errors import UserError
from ptf.rl.cluster import Pool, RoleSpec, Turns, split
from ptf.rl.replicas import FROZEN_S, Replicas


class RoleRank(Rank):
    """A worker that holds a role."""

    def build(self, cls: type, kwargs: Mapping[str, Any], device: str, timeout_s: float, replicate: int, tensor: int) -> str:
        self.leaving = contextlib.ExitStack()  # never left: the process group lasts as long as the process
        if cls.distributed:
            world = self.leaving.enter_context(joined(device, timeout_s, replicate, tensor=tensor))
        else:
            world = World(device=pick_device(device))
            self.leaving.enter_context(beating(world.clock, 0))
        self.role = cls(world, **kwargs)
        return str(world.device)

    def devices(self) -> str:
        """The GPUs that this process may use."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def see(self, devices: str) -> None:
        """Use these, before the first of them is used."""
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.role, method)(*args)

    def given(self, method: str, items: list[Any], *args: Any) -> Iterator[tuple[int, Any]]:
        """Results with the numbers of their items: as they come, of a generator."""
        results = getattr(self.role, method)(items, *args)
        yield from (pair for pair in (results if isinstance(results, Iterator) else enumerate(results)))  # Ray sends to a generator


class VerlGroup:
    """One role whose workers form a process group."""

    def __init__(self, spec: RoleSpec, gang: Gang, device: str) -> None:
        self.spec, self.gang = spec, gang
        what = (spec.cls, dict(spec.kwargs), device, gang.timeout_s, spec.replicate, spec.tensor)
        devices = gang.invoke("build", [what] * spec.workers, doing=f"building {spec.cls.__name__}")
        print(f"{spec.name}: {spec.cls.__name__} on {', '.join(devices)}", flush=True)

    def call(self, method: str, *args: Any) -> Any:
        workers, tensor = self.spec.workers, self.spec.tensor
        dispatch = getattr(getattr(self.spec.cls, method), "dispatch", "everywhere")
        shared = [share(arg) for arg in args[dispatch == "sharded" :]]  # once, however many workers read it
        first = [[part] for part in split(args[0], workers // tensor) for _ in range(tensor)] if dispatch == "sharded" else [[]] * workers
        results = self.gang.invoke("call", [(method, *part, *shared) for part in first], doing=f"{self.spec.name}.{method}")
        return [item for part in results[::tensor] for item in part] if dispatch == "sharded" else results[0]

    def memory(self) -> list[float]:
        return self.gang.invoke("call", [("memory_gib",)] * self.spec.workers, doing=f"{self.spec.name}.memory_gib")

    def where(self) -> list[str]:
        """Each worker with the memory that it holds now."""
        return [f"{self.spec.name} {member} {gib:.2f} GiB" for member, gib in zip(self.gang.members, self.memory(), strict=True)]


class VerlCluster(Turns):
    """Roles as Ray actors. `threads` is that of each process, by default the machine's cores divided by a role's workers."""

    def __init__(self, *, device: str, timeout_s: float, threads: int | None = None, pools: Sequence[Pool], restarts: int = 0) -> None:
        super().__init__(pools, device == "cuda" or (device == "auto" and gpus() > 0))
        self.device, self.timeout_s, self.threads, self.restarts = device, timeout_s, threads, restarts
        self._stack = contextlib.ExitStack()
        self._places: dict[str, Any] = {}  # of each pool

    def start(self, spec: RoleSpec) -> VerlGroup | Replicas:
        pool = self.pool(spec.name)
        if spec.workers > pool.workers:
            raise UserError(f"role {spec.name} has {spec.workers} workers, its pool {pool.name} {pool.workers} places")
        self.room(pool)
        group = self._group(spec, pool) if spec.cls.distributed else self._replicas(spec, pool)
        self.groups.append(group)
        self.awake[pool.name] = group
        return group

    def _group(self, spec: RoleSpec, pool: Pool) -> VerlGroup:
        gang = Gang(
            spec.name, workers=spec.workers, timeout_s=self.timeout_s, use_gpu=self.gpu, threads=self.threads, env=spec.env,
            pool=self._shared(pool, spec.workers), worker=RoleRank,
        )  # fmt: skip
        self._stack.enter_context(gang)
        return VerlGroup(spec, gang, self.device)

    def _replicas(self, spec: RoleSpec, pool: Pool) -> Replicas:
        threads, count = self.threads or max(1, (os.cpu_count() or 1) // spec.workers), spec.workers // spec.tensor
        places = [self._shared(pool, spec.tensor, i * spec.tensor) for i in range(count)]

        def made(i: int) -> Gang:
            return Gang(
                spec.name if count == 1 else f"{spec.name} {i}", workers=spec.tensor, timeout_s=self.timeout_s, use_gpu=self.gpu, threads=threads, env=spec.env,
                pool=places[i], worker=RoleRank, silent_s=min(FROZEN_S, self.timeout_s),
            )  # fmt: skip

        group = Replicas(spec, made, self.device, self.restarts)
        self._stack.callback(group.close)
        return group

    def _shared(self, pool: Pool, workers: int, start: int = 0) -> Any:
        """The pool's places, or a few of them."""
        if pool.name not in self._places:
            places = make_pool(pool.processes, use_gpu=self.gpu, timeout_s=self.timeout_s)
            self._stack.callback(release, places)
            self._places[pool.name] = places
        return part_of(self._places[pool.name], workers, start)

    def close(self) -> None:
        self._stack.close()
        self.groups.clear()
        self.awake.clear()
