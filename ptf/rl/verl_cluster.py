"""Roles on Ray: the `Cluster` protocol on gangs of verl's workers, one gang a role, each process with its own environment.

The one idea: on a CPU every role keeps its processes and takes turns only because the controller waits for it; on GPUs the roles share the
same devices, so whoever is awake parks before another wakes.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ptf.compute.gang import Gang, Rank, gpus, make_pool, part_of, release, share
from ptf.compute.world import World, joined, pick_device
from ptf.errors import UserError
from ptf.rl.cluster import RoleSpec, split

ON_ONE_GPU = 4  # processes that may share a device: policy, reference, rollout, and one to spare


class RoleRank(Rank):
    """A worker that holds a role."""

    def build(self, cls: type, kwargs: Mapping[str, Any], device: str, timeout_s: float, replicate: int, tensor: int) -> str:
        self.leaving = contextlib.ExitStack()  # never left: the process group lasts as long as the process
        world = self.leaving.enter_context(joined(device, timeout_s, replicate, tensor=tensor)) if cls.distributed else World(device=pick_device(device))
        self.role = cls(world, **kwargs)
        return str(world.device)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.role, method)(*args)


class VerlGroup:
    """One role on its workers."""

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

    def where(self) -> list[str]:
        """Each worker with the memory that it holds now."""
        held = self.gang.invoke("call", [("memory_gib",)] * self.spec.workers, doing=f"{self.spec.name}.memory_gib")
        return [f"{self.spec.name} {member} {gib:.2f} GiB" for member, gib in zip(self.gang.members, held, strict=True)]


class VerlCluster:
    """Roles as Ray actors. `threads` is that of each process, by default the machine's cores divided by a role's workers."""

    def __init__(self, *, device: str, timeout_s: float, threads: int | None = None) -> None:
        self.device, self.timeout_s, self.threads = device, timeout_s, threads
        self.use_gpu = device == "cuda" or (device == "auto" and gpus() > 0)
        self.seconds: dict[str, float] = {}
        self.groups: list[VerlGroup] = []
        self.awake: VerlGroup | None = None
        self._stack = contextlib.ExitStack()
        self._pool: Any = None  # the devices that all roles share; made for the first role

    def start(self, spec: RoleSpec) -> VerlGroup:
        """Start a role. On GPUs it is awake afterwards and whoever was is parked; a role may not be larger than the first."""
        self._park()
        gang = Gang(
            spec.name, workers=spec.workers, timeout_s=self.timeout_s, use_gpu=self.use_gpu, threads=self.threads, env=spec.env,
            pool=self._shared(spec) if self.use_gpu else None, worker=RoleRank,
        )  # fmt: skip
        self._stack.enter_context(gang)
        group = VerlGroup(spec, gang, self.device)
        self.groups.append(group)
        self.awake = group
        return group

    @contextlib.contextmanager
    def phase(self, group: VerlGroup, name: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.use_gpu and self.awake is not group:
            self._park()
            group.call("wake")
            self.awake = group
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _park(self) -> None:
        if self.use_gpu and self.awake is not None:
            self.awake.call("park")
            self.awake = None

    def _shared(self, spec: RoleSpec) -> Any:
        """The devices of the first role, or the first few of them."""
        if self._pool is None:
            self._pool = make_pool(spec.workers, use_gpu=True, timeout_s=self.timeout_s, colocate=ON_ONE_GPU)
            self._stack.callback(release, self._pool)
        if spec.workers > self._pool.world_size:
            raise UserError(f"role {spec.name} has {spec.workers} workers; on GPUs roles share those of the first, {self._pool.world_size}: compute.workers")
        return part_of(self._pool, spec.workers)

    def close(self) -> None:
        self._stack.close()
        self.groups.clear()
        self.awake = None
