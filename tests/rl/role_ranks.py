"""Online runs whose roles are on the ranks of a process group that exists already, without a Ray that starts them.

The first rank runs the job, and tells the others what to call; how arguments are dispatched is the code of runs on Ray.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from ptf.compute.world import World
from ptf.config import loads
from ptf.rl.cluster import LocalCluster, Pool, RoleSpec
from ptf.run import run
from tests.model.ranks import world_of

Raw = dict[str, Any]


class Ranks:
    """In place of a role's gang on Ray: one role on each rank."""

    timeout_s = 0.0

    def __init__(self, world: World) -> None:
        self.world, self.roles = world, dict[str, Any]()

    def do(self, name: str, method: str, calls: Sequence[Any]) -> list[Any]:
        """Make the role of this rank, or call it; return what all ranks return."""
        first, *rest = calls[self.world.rank]
        if method == "build":
            self.roles[name] = first.cls(self.world, first.settings)
            return self.world.all_gather_object("cpu")
        return self.world.all_gather_object(getattr(self.roles[name], first)(*rest))

    def invoke(self, method: str, calls: Sequence[Any], doing: str) -> list[Any]:
        name = calls[0][0].name if method == "build" else doing.partition(".")[0]
        dist.broadcast_object_list([(name, method, calls)], src=0)
        return self.do(name, method, calls)

    def serve(self) -> None:
        """Do what the first rank tells, until it tells nothing."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0)
            if told[0] is None:
                return
            self.do(*told[0])


class RanksCluster(LocalCluster):
    """Roles with a process group on all ranks, others in this process."""

    def __init__(self, ranks: Ranks, pools: Sequence[Pool]) -> None:
        super().__init__(World(), pools)
        self.ranks = ranks

    def make_group(self, spec: RoleSpec, pool: Pool) -> Any:
        from ptf.rl.ray_cluster import VerlRoleGroup

        if not spec.cls.uses_process_group:
            return super().make_group(spec, pool)
        return VerlRoleGroup(spec, self.ranks, "cpu")  # type: ignore[arg-type]


@contextlib.contextmanager
def cluster_of(ranks: Ranks, job: Any, run: Path, pools: Sequence[Pool]) -> Iterator[RanksCluster]:
    cluster = RanksCluster(ranks, pools)
    try:
        yield cluster
    finally:
        cluster.close()


def train_online_as_rank(jobs: Sequence[tuple[Raw, str]]) -> None:
    """Train each job of as many workers as there are ranks, under its name."""
    for raw, run_name in jobs:
        job = loads(yaml.safe_dump(raw))
        ranks = Ranks(world_of(job.compute.mesh.sizes(job.compute.workers)))
        if ranks.world.leads:
            from ptf.rl import online_run, ray_cluster

            ray_cluster.put = lambda value: value  # type: ignore[assignment]
            online_run.job_cluster = partial(cluster_of, ranks)  # type: ignore[assignment]
            run(job, run_name)
            dist.broadcast_object_list([None], src=0)
        else:
            ranks.serve()
