"""A gang: N processes on Ray that run the same functions, usually as one process group. verl's worker groups place and
start them.

The driver reports any failure of a rank at once, with the rank's name. An exception of a function on a rank is raised
again in the driver; a process that died, or a deadline that passed, becomes a RuntimeError with rank, pid and the task.
"""

# ruff: noqa: E402  environment variables come before the imports that read them

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptf.compute.ray_session import ray_session  # first: it sets what Ray reads when it is imported

# "nvidia" names the GPU resource; without it verl warns about CPUs
os.environ.update(
    {"VERL_LOGGING_LEVEL": "ERROR", "VERL_PLATFORM": "nvidia", "VERL_USE_EXTERNAL_PLUGINS": "none", **os.environ}
)
_handlers = list(logging.root.handlers)

from ptf.workspace.entry import end_with_parent, large_imports

with large_imports():
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from verl.single_controller.base import Worker
    from verl.single_controller.ray.base import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        SubRayResourcePool,
    )

from ptf.compute.heartbeat import ADDRESS, BEAT_S, SILENT_S, Monitor
from ptf.compute.launch import default_threads
from ptf.config.sections.compute import ComputeConfig
from ptf.errors import Lost

logging.root.handlers[:] = _handlers  # verl installs one, after which the program's own basicConfig would do nothing

# environment variables that every rank gets: it may run on another machine, and may import torch before ptf
PASSED_ON = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PTF_PLUGIN_PATH")
# seconds to wait after the first failure: one rank's error makes the collectives of the other ranks fail, so the error
# that explains the others may arrive later
ECHO_S = 2.0
GRACE_S = 10.0  # added to the deadline, so that a generator, which has the same deadline, can report first
FETCH_S = 600.0  # to copy one finished result to the driver


@dataclass(frozen=True)
class RankProcess:
    """One process of a gang: rank, actor, pid and node."""

    rank: int
    actor: str
    pid: int
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} (actor {self.actor[:8]}, pid {self.pid}, node {self.node})"


class RankWorker(Worker):
    """One process of a gang.

    verl's Worker sets RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* for `ptf.compute.world.joined`.
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label
        # without this the process may stay for a minute after its raylet has ended
        end_with_parent()

    def __repr__(self) -> str:  # Ray puts it before every line that this process prints
        return f"{self.label} {self.rank}"

    def member(self) -> RankProcess:
        """Return this process's rank, actor, pid and node."""
        context = ray.get_runtime_context()
        return RankProcess(self.rank, context.get_actor_id() or "", os.getpid(), ray.util.get_node_ip_address())

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Yield what a generator method yields, one by one."""
        yield from getattr(self, method)(*args)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function."""
        return fn(*args)


class Gang:
    """`workers` processes that were started and know each other; `env` is added to the environment of each.

    Every wait raises Lost after `timeout_s`, or if a process sent no heartbeat for `silent_s`.
    """

    def __init__(
        self,
        label: str,
        *,
        workers: int,
        timeout_s: float,
        use_gpu: bool = False,
        threads: int | None = None,
        env: Mapping[str, str] | None = None,
        pool: RayResourcePool | None = None,
        worker: type[RankWorker] = RankWorker,
        silent_s: float | None = None,
    ) -> None:
        self.label, self.timeout_s, self.silent_s = label, timeout_s, silent_s or timeout_s
        self.members: list[RankProcess] = []
        self._owned = pool is None
        self._group: RayWorkerGroup | None = None
        self._monitor = Monitor(label, ray.util.get_node_ip_address())
        self._pool = pool or make_pool([1] * workers, use_gpu=use_gpu, timeout_s=timeout_s)
        threads = threads or default_threads(min(workers, max(self._pool.store)))
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            **(env or {}),
            ADDRESS: self._monitor.address,
        }
        try:
            address, port = _rendezvous(_groups(self._pool)[0], timeout_s)
            self._group = RayWorkerGroup(
                resource_pool=self._pool,
                ray_cls_with_init=RayClassWithInitArgs(ray.remote(worker), label),
                worker_env=environment,
                bin_pack=True,
                use_gpu=use_gpu,
                device_name="cuda" if use_gpu else "cpu",
                master_addr=address,
                master_port=port,
            )
            self.members = self.invoke("member", [()] * workers, doing="starting")
        except BaseException:
            self.close()
            raise
        for member in self.members:
            print(f"{label}: {member}", flush=True)

    def execute(
        self, fn: Callable[..., Any], per_rank_args: Sequence[Sequence[Any]], timeout_s: float | None = None
    ) -> list[Any]:
        """Call `fn(*per_rank_args[rank])` on every rank; return the results in rank order."""
        return self.invoke(
            "run",
            [(fn, *args) for args in per_rank_args],
            doing=getattr(fn, "__qualname__", str(fn)),
            timeout_s=timeout_s,
        )

    def invoke(
        self, method: str, per_rank_args: Sequence[Sequence[Any]], *, doing: str, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of as many of the first workers as there are arguments, like `execute`. An argument that is an
        ObjectRef arrives as its value."""
        assert self._group is not None, f"{self.label} is closed"
        calls = zip(self._group.workers, per_rank_args, strict=False)
        refs = [getattr(worker, method).remote(*args) for worker, args in calls]
        return self._gather(refs, doing, self.timeout_s if timeout_s is None else timeout_s)

    def stream(self, method: str, args: Sequence[Any], *, doing: str) -> Iterator[Any]:
        """Yield what a generator method of the first worker yields, as it arrives; otherwise like `invoke`."""
        assert self._group is not None, f"{self.label} is closed"
        # the generator has the same deadline, and its error says more than that it passed
        deadline = time.monotonic() + self.timeout_s + GRACE_S
        items = self._group.workers[0].stream.options(num_returns="streaming").remote(method, *args)
        heard = -math.inf
        while True:
            if time.monotonic() >= heard + BEAT_S:  # not for each item: a look takes as long as some items
                heard = time.monotonic()
                self._watch([0], doing)
            if time.monotonic() > deadline:
                raise Lost(f"{self.label} {self._name(0)}: not done with {doing} after {self.timeout_s:g} s")
            if not ray.wait([items], timeout=max(0.0, heard + BEAT_S - time.monotonic()))[0]:
                continue
            try:
                yield ray.get(next(items), timeout=FETCH_S)
            except StopIteration:
                return
            except (RayTaskError, RayActorError) as error:
                raise self._verdict({0: error}, doing) from None

    def _gather(self, refs: Sequence[Any], doing: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failures: dict[int, RayTaskError | RayActorError] = {}
        while ranks:
            left = deadline - time.monotonic()
            self._watch([*ranks.values()], doing)
            if left <= 0:
                if failures:
                    self._raise_if_silent(ranks.values(), doing, SILENT_S)
                    raise self._verdict(failures, doing, ranks.values())
                raise Lost(f"{self.label} {self._names(ranks.values())}: did not finish {doing} within {timeout_s:g} s")
            done, _ = ray.wait(list(ranks), num_returns=1, timeout=min(left, 1.0))
            for ref in done:
                rank = ranks.pop(ref)
                try:
                    results[rank] = ray.get(ref, timeout=min(max(left, 1.0), FETCH_S))
                except (RayTaskError, RayActorError) as error:
                    deadline = min(deadline, time.monotonic() + ECHO_S) if not failures else deadline
                    failures[rank] = error
        if failures:
            raise self._verdict(failures, doing)
        return [results[rank] for rank in range(len(refs))]

    def _watch(self, ranks: Sequence[int], doing: str) -> None:
        """Print what the heartbeats of ranks that should be working say. Raises Lost if one is silent for too long."""
        for message in self._monitor.poll(ranks):
            print(message, flush=True)
        self._raise_if_silent(ranks, doing, self.silent_s)

    def _raise_if_silent(self, ranks: Iterable[int], doing: str, limit_s: float) -> None:
        for rank in ranks:
            if (silent_s := self._monitor.silent_seconds(rank)) > limit_s:
                raise Lost(
                    f"{self.label} {self._name(rank)} sent no heartbeat for {silent_s:.0f} s while doing {doing}"
                    f"{self._monitor.describe(rank)}"
                )

    def _verdict(
        self, failures: Mapping[int, RayTaskError | RayActorError], doing: str, late: Iterable[int] = ()
    ) -> BaseException:
        """Return the failure that explains the others: a death, then anything but a RuntimeError (a broken collective
        is one), then the first.

        `late`: ranks that have neither failed nor finished.
        """
        rank, error = min(
            failures.items(),
            key=lambda item: (not isinstance(item[1], RayActorError), isinstance(_cause(item[1]), RuntimeError)),
        )
        if isinstance(error, RayActorError):
            reason = " ".join(str(error).split())[:400]
            failed = Lost(
                f"{self.label} {self._name(rank)} died while doing {doing}: {reason}{self._monitor.describe(rank)}"
            )
        else:
            failed = _cause(error)
            failed.add_note(f"raised in {self.label} {self._name(rank)} while doing {doing}")
            if late and isinstance(failed, RuntimeError):
                failed.add_note(f"it may have waited for {self._names(late)}")
        failed.__cause__ = error if failed is not error else None  # its text is the traceback of the worker
        return failed

    def _name(self, rank: int) -> str:
        return str(self.members[rank]) if self.members else f"rank {rank}"

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(self._name(rank) + self._monitor.describe(rank) for rank in ranks)

    def close(self) -> None:
        """Kill the processes and release their places."""
        for worker in self._group.workers if self._group else []:
            ray.kill(worker)
        if self._owned:
            release(self._pool)
        self._group = None
        self._monitor.close()


def _cause(error: RayTaskError | RayActorError) -> BaseException:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def layout(workers: int, slots: Sequence[int]) -> list[int]:
    """Return the number of workers on each node, the same on each, on as few nodes as can hold them. Raises
    RuntimeError if they do not fit."""
    for nodes in range(1, workers + 1):
        if workers % nodes == 0 and sum(free >= workers // nodes for free in slots) >= nodes:
            return [workers // nodes] * nodes
    raise RuntimeError(
        f"{workers} workers cannot be placed: every node that is used must hold the same number, and the nodes have "
        f"{sorted(slots, reverse=True)} places in total, used ones included; change the number of workers or join a "
        "larger cluster"
    )


def make_pool(processes: Sequence[int], *, use_gpu: bool, timeout_s: float) -> RayResourcePool:
    """Reserve places, each for that many `processes`: one GPU, which they share, or as many CPU slots.

    Raises RuntimeError if they are not free in time.
    """
    resource, most, workers = ("GPU" if use_gpu else "CPU"), max(processes), len(processes)
    free = [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]
    together = not use_gpu and max(free, default=0) >= sum(processes)
    nodes = [workers] if together else layout(workers, free if use_gpu else [slots // most for slots in free])
    pool = RayResourcePool(process_on_nodes=nodes, use_gpu=use_gpu, max_colocate_count=most)
    left = iter(processes)
    places = [
        [{"CPU": float(next(left)), **({"GPU": 1.0} if use_gpu else {})} for _ in range(count)] for count in nodes
    ]
    # verl itself would wait for them without a deadline
    pool.pgs = [placement_group(bundles, strategy="STRICT_PACK") for bundles in places]
    try:
        ray.get([group.ready() for group in pool.pgs], timeout=timeout_s)
    except GetTimeoutError:
        release(pool)
        free = ray.available_resources().get(resource, 0)
        raise RuntimeError(
            f"no room for {workers} workers after {timeout_s:g} s: {free:g} {resource} slots are free in the cluster"
        ) from None
    return pool


def part_of(pool: RayResourcePool, workers: int, start: int = 0) -> RayResourcePool:
    """Return `workers` places of a pool, from `start` on."""
    if workers == pool.world_size:
        return pool
    return SubRayResourcePool(
        placement_groups=_groups(pool),
        start_bundle_index=start,
        subgroup_world_size=workers,
        process_on_nodes=pool.store,
        use_gpu=pool.use_gpu,
        max_colocate_count=pool.max_colocate_count,
    )


def _groups(pool: RayResourcePool) -> list[PlacementGroup]:
    assert pool.pgs is not None, "the pool came from make_pool, which reserves its places"
    return pool.pgs


def release(pool: RayResourcePool) -> None:
    """Remove the pool's reservations."""
    for group in _groups(pool):
        remove_placement_group(group)


def gpus() -> int:
    """Return the number of GPUs of the cluster that this process is connected to."""
    return int(ray.cluster_resources().get("GPU", 0))


def put(value: object) -> ray.ObjectRef:
    """Store a value once where all workers can read it; an argument that is the reference arrives as the value."""
    return ray.put(value)


def _rendezvous(group: PlacementGroup, timeout_s: float) -> tuple[str, str]:
    """Return the address and a free port of rank 0's node.

    verl asks for them without a deadline, in a process that first imports verl.
    """

    def here() -> tuple[str, str]:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    return ray.get(ray.remote(here).options(num_cpus=0, scheduling_strategy=place).remote(), timeout=timeout_s)


def on_ray(
    function: Callable[..., object], arguments: Sequence[object], compute: ComputeConfig, workdir: Path, label: str
) -> None:
    """Call a function on every rank of a gang and wait until all are done, however long that takes: a rank that dies
    is noticed when it dies. `label` is the gang's name on the console and in errors."""
    workers, timeout_s = compute.workers, compute.timeout_s
    with ray_session(address=compute.address, workdir=workdir, cpus=workers, timeout_s=timeout_s):
        gpu = compute.device == "cuda" or (compute.device == "auto" and gpus() > 0)
        gang = Gang(label, workers=workers, timeout_s=timeout_s, use_gpu=gpu, threads=compute.threads)
        with contextlib.closing(gang):
            gang.execute(function, [tuple(arguments)] * workers, timeout_s=math.inf)
