"""The cluster that runs a job's roles, and the pools that the roles share."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ptf.compute.launch import default_threads
from ptf.compute.world import joined
from ptf.config import Job
from ptf.config.sections.compute import PoolConfig
from ptf.errors import UserError
from ptf.rl.cluster import Cluster, LocalCluster, Pool, RoleSpec
from ptf.rl.weights.transport import SYNC

OFFLOADED = "offloaded"  # directory in the run's: files of roles that are offloaded to disk


@contextlib.contextmanager
def job_cluster(job: Job, run: Path, pools: Sequence[Pool], local: bool = False) -> Iterator[Cluster]:
    """Run a block with the cluster of this job's roles: on Ray, or (launcher local, or `local`) in this process."""
    threads = job.compute.threads or default_threads(1)
    temporary = [run / OFFLOADED, run / SYNC]
    for directory in temporary:  # left by an attempt that was killed
        shutil.rmtree(directory, ignore_errors=True)
    try:
        with _start_cluster(job, run, pools, threads, local) as cluster:
            yield cluster
    finally:
        for directory in temporary:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _start_cluster(job: Job, run: Path, pools: Sequence[Pool], threads: int, local: bool) -> Iterator[Cluster]:
    compute = job.compute
    if local or compute.launcher == "local":
        with joined(compute.device, compute.timeout_s, threads=threads) as world:
            cluster = LocalCluster(world, pools)
            try:
                yield cluster
            finally:
                cluster.close()
    elif compute.launcher == "ray":
        from ptf.compute.ray_session import ray_session
        from ptf.rl.ray_cluster import VerlCluster

        processes = sum(sum(pool.processes) for pool in pools)
        # with an http address, training is a job on that cluster, but evaluation uses this machine
        address = None if (compute.address or "").startswith(("http://", "https://")) else compute.address
        with ray_session(address=address, workdir=run, cpus=processes, timeout_s=compute.timeout_s):
            cluster = VerlCluster(
                device=compute.device,
                threads=compute.threads,
                timeout_s=compute.timeout_s,
                pools=pools,
                restarts=compute.restarts,
            )
            try:
                yield cluster
            finally:
                cluster.close()
    else:
        raise UserError("compute.launcher: torchrun runs offline recipes only; use ray or local for online recipes")


class HasWorkers(Protocol):
    """A role as far as a pool counts its devices."""

    @property
    def workers(self) -> int:
        """Devices, or processes on a CPU."""
        ...


def pools_of(configs: Mapping[str, PoolConfig], specs: Mapping[str, HasWorkers]) -> list[Pool]:
    """Return the pools of `compute.pools`; without any, one pool of all roles.

    Raises UserError unless every role of the job, and no other, is in a pool.
    """
    roles_of = {name: frozenset(config.roles) for name, config in configs.items()} or {"all": frozenset(specs)}
    placed = frozenset[str]().union(*roles_of.values())
    if wrong := placed ^ specs.keys():
        role = sorted(wrong)[0]
        if role in specs:
            raise UserError(f"compute.pools: no pool has the role {role}; add it to one")
        raise UserError(f"compute.pools: this job has no role {role}; it has {', '.join(specs)}")
    pools = []
    for name, roles in roles_of.items():
        sizes = [specs[role].workers for role in roles]
        processes = tuple(sum(size > i for size in sizes) for i in range(max(sizes)))
        pools.append(Pool(name, roles, processes, disk=name in configs and configs[name].offload == "disk"))
    return pools


def with_offload_path(spec: RoleSpec, pools: Sequence[Pool], run: Path) -> RoleSpec:
    """Return the role with the directory to which its pool offloads it, if that is on disk."""
    if not any(pool.disk and spec.name in pool.roles for pool in pools):
        return spec
    return replace(spec, kwargs={**spec.kwargs, "offload_path": str(run / OFFLOADED / spec.name)})
