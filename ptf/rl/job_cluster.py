"""The cluster that runs a job's roles, and the pools that the roles share."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ptf.compute.launch import default_threads
from ptf.compute.world import joined
from ptf.config import Job
from ptf.config.sections.compute import PoolConfig
from ptf.errors import UserError
from ptf.rl.cluster import Cluster, LocalCluster, Pool
from ptf.rl.weights.transport import SYNC

OFFLOADED = "offloaded"  # directory in the run's: files of roles that are offloaded to disk


@contextlib.contextmanager
def job_cluster(job: Job, run: Path, pools: Sequence[Pool], local: bool = False) -> Iterator[Cluster]:
    """Run a block with the cluster of this job's roles: on Ray, or (launcher local, or `local`) in this process."""
    compute, temporary = job.compute, [run / OFFLOADED, run / SYNC]
    with contextlib.ExitStack() as stack:
        for directory in temporary:
            shutil.rmtree(directory, ignore_errors=True)  # left by an attempt that was killed
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        if local or compute.launcher == "local":
            world = stack.enter_context(
                joined(compute.device, compute.timeout_s, threads=compute.threads or default_threads(1))
            )
            cluster = LocalCluster(world, pools)
        elif compute.launcher == "ray":
            from ptf.compute.ray_session import ray_session
            from ptf.rl.ray_cluster import VerlCluster

            processes = sum(sum(pool.processes) for pool in pools)
            # with an http address, training is a job on that cluster, but evaluation uses this machine
            address = None if (compute.address or "").startswith(("http://", "https://")) else compute.address
            stack.enter_context(ray_session(address=address, workdir=run, cpus=processes, timeout_s=compute.timeout_s))
            cluster = VerlCluster(
                device=compute.device,
                threads=compute.threads,
                timeout_s=compute.timeout_s,
                pools=pools,
                restarts=compute.restarts,
            )
        else:
            raise UserError("compute.launcher: torchrun runs offline recipes only; use ray or local for online recipes")
        stack.callback(cluster.close)
        yield cluster


def pools_of(configs: Mapping[str, PoolConfig], workers: Mapping[str, int]) -> list[Pool]:
    """Return the pools of `compute.pools`; without any, one pool of all roles. `workers` has the devices of each role,
    or on a CPU its processes.

    Raises UserError unless every role of the job, and no other, is in a pool.
    """
    roles_of = {name: frozenset(config.roles) for name, config in configs.items()} or {"all": frozenset(workers)}
    placed = frozenset[str]().union(*roles_of.values())
    if wrong := placed ^ workers.keys():
        role = sorted(wrong)[0]
        if role in workers:
            raise UserError(f"compute.pools: no pool has the role {role}; add it to one")
        raise UserError(f"compute.pools: this job has no role {role}; it has {', '.join(workers)}")
    pools = []
    for name, roles in roles_of.items():
        sizes = [workers[role] for role in roles]
        processes = tuple(sum(size > i for size in sizes) for i in range(max(sizes)))
        pools.append(Pool(name, roles, processes, disk=name in configs and configs[name].offload == "disk"))
    return pools


def offload_path(job: Job, run: Path, role: str) -> str | None:
    """Return the directory to which a role's pool offloads it, if that is on disk."""
    on_disk = any(pool.offload == "disk" and role in pool.roles for pool in job.compute.pools.values())
    return str(run / OFFLOADED / role) if on_disk else None
