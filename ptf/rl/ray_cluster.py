"""Roles on Ray: a `Cluster` of gangs of verl's workers, one gang for each role.

A pool is a set of reserved slots. Each of its roles has one process on as many slots as it needs, with its own
environment variables. If the pool offloads, the loaded role frees its memory before the next one is loaded.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ptf.compute.gang import Gang, RankWorker, gpus, make_pool, part_of, put, release
from ptf.compute.heartbeat import beating
from ptf.compute.launch import default_threads
from ptf.compute.world import World, joined, pick_device
from ptf.errors import UserError
from ptf.rl.cluster import JOINED, Cluster, OnResult, Pool, RoleSpec
from ptf.rl.replicas import HUNG_S, Replicas


class RoleRank(RankWorker):
    """A worker process that holds a role."""

    def build(self, spec: RoleSpec, device: str, timeout_s: float, visible: str = "") -> str:
        """Make the role, in the gang's process group if the class is distributed. Return its device and process.

        `visible`: the GPUs that this process may use, if they are not those that it got.
        """
        if visible:  # before CUDA is initialised
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        self.contexts = contextlib.ExitStack()  # never closed: the process group lives as long as the process
        if spec.cls.uses_process_group:
            world = self.contexts.enter_context(joined(device, timeout_s, spec.mesh))
        else:
            world = World(device=pick_device(device))
            self.contexts.enter_context(beating(world.clock, 0))
        self.role = spec.cls(world, spec.settings)
        return f"{world.device} (pid {os.getpid()})"

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the role."""
        return getattr(self.role, method)(*args)

    def call_streaming(self, method: str, items: list[Any], *args: Any) -> Iterator[list[tuple[int, Any]]]:
        """Yield lists of (index of the item, result), as a generator method yields them; one list of any other's."""
        results = getattr(self.role, method)(items, *args)
        # wrapped in a new generator, because Ray sends values into the generator that it iterates over
        yield from (part for part in (results if isinstance(results, Iterator) else [list(enumerate(results))]))


class VerlRoleGroup:
    """One role whose workers form a process group."""

    def __init__(self, spec: RoleSpec, gang: Gang, device: str) -> None:
        self.spec, self.gang = spec, gang
        devices = gang.invoke(
            "build", [(spec, device, gang.timeout_s)] * spec.mesh.ranks, doing=f"building {spec.cls.__name__}"
        )
        print(f"{spec.name}: {spec.cls.__name__} on {', '.join(devices)}", flush=True)

    def call(self, method: str, *args: Any, on_result: OnResult | None = None) -> Any:
        """See RoleGroup.call. Its workers give their results together, so `on_result` is not called."""
        mesh = self.spec.mesh
        dispatch = getattr(getattr(self.spec.cls, method), "dispatch", "broadcast")
        is_split = dispatch == "split"
        shared = [put(arg) for arg in args[is_split:]]  # stored once, however many workers read it
        if is_split:
            parts = np.array_split(range(len(args[0])), mesh.data)
            first = [[[args[0][i] for i in part]] for part in parts for _ in range(mesh.model)]
        else:
            first = [[]] * mesh.ranks
        results = self.gang.invoke(
            "call", [(method, *part, *shared) for part in first], doing=f"{self.spec.name}.{method}"
        )
        if not is_split:
            return JOINED.get(dispatch, itemgetter(0))(results)
        return [item for part in results[:: mesh.model] for item in part]


class VerlCluster(Cluster):
    """Roles as Ray actors.

    `threads` is the number of threads of each process, by default this machine's cores divided by the role's workers
    on a node.
    """

    def __init__(
        self, *, device: str, timeout_s: float, threads: int | None = None, pools: Sequence[Pool], restarts: int = 0
    ) -> None:
        super().__init__(pools, device == "cuda" or (device == "auto" and gpus() > 0))
        self.device, self.timeout_s, self.threads, self.restarts = device, timeout_s, threads, restarts
        self._slots: dict[str, Any] = {}  # pool → its placement group

    def make_group(self, spec: RoleSpec, pool: Pool) -> VerlRoleGroup | Replicas:
        """See Cluster.make_group."""
        workers, slots = spec.mesh.ranks, len(pool.processes)
        if workers > slots:
            raise UserError(f"role {spec.name} has {workers} workers, but its pool {pool.name} has {slots} slots")
        if not spec.cls.uses_process_group:
            return self._start_replicas(spec, pool)
        gang = Gang(
            spec.name,
            workers=workers,
            timeout_s=self.timeout_s,
            use_gpu=self.gpu,
            threads=self.threads,
            env=spec.env,
            pool=self._shared(pool, workers),
            worker=RoleRank,
        )
        self.closing.callback(gang.close)
        return VerlRoleGroup(spec, gang, self.device)

    def _start_replicas(self, spec: RoleSpec, pool: Pool) -> Replicas:
        count, size = spec.mesh.data, spec.mesh.model
        slots = [self._shared(pool, size, i * size) for i in range(count)]
        threads = self.threads or default_threads(min(spec.mesh.ranks, max(self._slots[pool.name].store)))

        def start_replica(i: int) -> Gang:
            return Gang(
                spec.name if count == 1 else f"{spec.name} {i}",
                workers=size,
                timeout_s=self.timeout_s,
                use_gpu=self.gpu,
                threads=threads,
                env=spec.env,
                pool=slots[i],
                worker=RoleRank,
                silent_s=min(HUNG_S, self.timeout_s),
            )

        group = Replicas(spec, start_replica, self.device, self.restarts)
        self.closing.callback(group.close)
        return group

    def _shared(self, pool: Pool, workers: int, start: int = 0) -> Any:
        """Return `workers` of the pool's slots, which are reserved at the first call."""
        if pool.name not in self._slots:
            slots = make_pool(pool.processes, use_gpu=self.gpu, timeout_s=self.timeout_s)
            self.closing.callback(release, slots)
            self._slots[pool.name] = slots
        return part_of(self._slots[pool.name], workers, start)
