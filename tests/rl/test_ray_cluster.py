"""A role does on Ray what it does in this process, and the cluster says who failed at what.
On GPUs (logical ones here) roles take turns."""

import inspect
import json
import os
import re
import signal
import textwrap
import time
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.errors import Lost, UserError
from ptf.rl import ray_cluster, replicas
from ptf.rl.cluster import LocalCluster, Pool, RoleSpec, broadcast, split_over_workers, summed_broadcast
from ptf.rl.ray_cluster import VerlCluster
from tests.child import run_python
from tests.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.long]


class Echo:
    """A role whose methods return what they were given, and which records when it is offloaded and restored."""

    uses_process_group: ClassVar[bool] = False

    def __init__(self, world: World, word: str) -> None:
        self.world, self.word, self.log = world, word, ["made"]

    @split_over_workers
    def mark(self, items: list[int], suffix: str) -> list[str]:
        return [f"{self.word}{item}{suffix}" for item in items]

    @split_over_workers
    def process(self, items: list[int]) -> list[int]:
        return [os.getpid()] * len(items)

    @broadcast
    def total(self, tensors: list[tuple[str, torch.Tensor]]) -> float:
        return float(sum(tensor.sum() for _, tensor in tensors))

    @broadcast
    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    @broadcast
    def fail(self) -> None:
        raise UserError("rollout.prompts_per_step is wrong")

    @split_over_workers
    def die(self, items: list[bool]) -> list[None]:
        if items[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return [None]

    @broadcast
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def offload(self) -> None:
        self.log.append("offloaded")

    def onload(self) -> None:
        self.log.append("awake")

    @broadcast
    def history(self) -> list[str]:
        return self.log

    @broadcast
    def peak_memory_gib(self) -> float:
        return 0.25


class Team(Echo):
    """Its workers are one process group."""

    uses_process_group: ClassVar[bool] = True

    @broadcast
    def sum(self, value: float) -> float:
        return float(self.world.sum(value + self.world.rank))

    @broadcast
    def place(self) -> tuple[int, int]:
        return self.world.rank, self.world.size

    @summed_broadcast
    def rank(self) -> int:
        return self.world.rank + 10


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    cluster = VerlCluster(device="cpu", timeout_s=300, pools=[Pool("all", frozenset({"echo", "team"}), (2, 2))])
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def echo(cluster):
    return cluster.start(RoleSpec("echo", Echo, "e", MeshSizes(shard=2), {"ONLY_ECHO": "1"}))


@pytest.fixture(scope="module")
def team(cluster):
    return cluster.start(RoleSpec("team", Team, "t", MeshSizes(shard=2)))


def test_sharded_calls_split_the_list_and_join_the_results_in_order(echo):
    for count in (0, 1, 2, 7):
        assert echo.call("mark", list(range(count)), "!") == [f"e{i}!" for i in range(count)]
    assert len(set(echo.call("process", list(range(5))))) == 2


def test_a_role_does_the_same_in_this_process(echo):
    local = LocalCluster(World(), [Pool("all", frozenset({"echo"}), (1,))]).start(RoleSpec("echo", Echo, "e"))
    tensors = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2))]
    for method, args in (("mark", ([1, 2, 3], "?")), ("total", (tensors,))):
        assert echo.call(method, *args) == local.call(method, *args)


def test_roles_have_processes_and_environments_of_their_own(echo, team):
    assert echo.call("env", "ONLY_ECHO") == "1"
    assert team.call("env", "ONLY_ECHO") is None
    pids = {member.pid for gang in (*echo.gangs, team.gang) for member in gang.members}
    assert len(pids | {os.getpid()}) == 5


def test_a_distributed_role_is_one_process_group(team):
    assert team.call("place") == (0, 2)
    assert team.call("sum", 10.0) == 21.0
    assert team.call("rank") == 10 + 11, "the sum of what the ranks return"


def test_what_all_workers_get_is_stored_once(echo, team, monkeypatch):
    stored = []
    for module, group in ((replicas, echo), (ray_cluster, team)):
        put = module.put
        monkeypatch.setattr(module, "put", lambda value, put=put: stored.append(value) or put(value))
        weights = [("big", torch.from_numpy(np.full(1 << 20, 0.5, np.float32)))]
        assert group.call("total", weights) == 1 << 19
    assert len(stored) == 2


def test_errors_keep_their_type_and_name_role_and_method(echo):
    with pytest.raises(UserError, match=r"rollout\.prompts_per_step is wrong") as caught:
        echo.call("fail")
    (said,) = caught.value.__notes__
    # both fail: either is first
    named = re.match(r"raised in echo ([01]) rank 0 \(actor \w+, pid (\d+), .*\) while doing echo\.fail$", said)
    assert named, said
    assert int(named[2]) == echo.gangs[int(named[1])].members[0].pid


def test_phases_add_up_their_seconds_and_on_a_cpu_nobody_is_offloaded(cluster, echo, team):
    cluster.table.clear()
    for group in (echo, team, echo):
        with cluster.phase(group, "turn"):
            time.sleep(0.05)
    assert 0.15 <= sum(one.seconds for one in cluster.table) < 1
    assert echo.call("history") == team.call("history") == ["made"]


def test_a_late_or_dead_worker_is_named_and_close_leaves_no_process(ray_cluster):
    cluster = VerlCluster(device="cpu", timeout_s=40, pools=[Pool("all", frozenset({"rollout"}), (1, 1))])
    group = cluster.start(RoleSpec("rollout", Echo, "", MeshSizes(shard=2)))
    pids = [gang.members[0].pid for gang in group.gangs]
    for gang in group.gangs:
        gang.timeout_s = 1.0
    # both are: either is first
    late = "|".join(rf"rollout {i} rank 0 \(actor \w+, pid {pid}," for i, pid in enumerate(pids))
    with pytest.raises(Lost, match=rf"({late}).*did not finish rollout\.sleep within 1 s"):
        group.call("sleep", 2.0)
    for gang in group.gangs:
        gang.timeout_s = 40.0
    began = time.monotonic()
    with pytest.raises(Lost, match=rf"rollout 1 rank 0 \(actor \w+, pid {pids[1]}, .*died while doing rollout\.die"):
        group.call("die", [False, True])
    assert time.monotonic() - began < 10
    cluster.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)


GPUS = """
    import json
    from ptf.compute.ray_session import ray_session
    from ptf.config.sections.compute import MeshSizes
    from ptf.errors import Lost, UserError
    from ptf.rl.cluster import Pool, RoleSpec
    from ptf.rl.ray_cluster import VerlCluster
    from tests.rl.test_ray_cluster import Echo

    with ray_session(cpus=10, gpus=3, timeout_s=300):
        pools = [Pool("shared", frozenset({"policy", "rollout", "wide"}), (3, 3)), 
                 Pool("own", frozenset({"critic"}), (1,))]
        cluster = VerlCluster(device="auto", timeout_s=300, pools=pools)
        policy = cluster.start(RoleSpec("policy", Echo, "p", MeshSizes(shard=2)))
        rollout = cluster.start(RoleSpec("rollout", Echo, "r", MeshSizes(shard=1)))
        critic = cluster.start(RoleSpec("critic", Echo, "c", MeshSizes(shard=1)))
        devices = [group.call("env", "CUDA_VISIBLE_DEVICES") for group in (policy, rollout, critic)]
        with cluster.phase(rollout, "rollout"):
            pass
        for group in (policy, critic, policy):
            with cluster.phase(group, "turn"):
                pass
        histories = [group.call("history") for group in (policy, rollout, critic)]
        try:
            cluster.start(RoleSpec("wide", Echo, "w", MeshSizes(shard=3)))
            refused = ""
        except UserError as error:
            refused = str(error)
        print("SAID", json.dumps([devices, *histories, refused]), flush=True)
        cluster.close()
"""


@pytest.mark.cluster
def test_on_gpus_roles_share_devices_and_take_turns(tmp_path):
    """The GPUs are logical: Ray places by them, torch sees none."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    script = tmp_path / "gpus.py"
    script.write_text(textwrap.dedent(GPUS))
    done = run_python(str(script), env={**env, "PYTHONPATH": os.getcwd()}, timeout=400)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert said, done.stderr[-2000:]
    devices, policy, rollout, critic, refused = json.loads(said[0].removeprefix("SAID "))
    assert devices[0] == devices[1], "rank 0 of both roles must have the same GPU"
    assert set(devices) < {"0", "1", "2"}
    assert devices[2] != devices[0], "a pool has devices of its own"
    assert policy == ["made", "offloaded", "awake"]
    assert rollout == ["made", "offloaded"]
    assert critic == ["made"]
    assert "role wide has 3 workers" in refused


def test_the_symbols_of_verl_that_are_used_are_as_they_were():
    """An upgrade of verl that moves or changes one fails here, and not in a run."""
    import verl
    from verl.single_controller.base import Worker
    from verl.single_controller.ray.base import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        SubRayResourcePool,
    )

    def parameters(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert verl.__version__.startswith("0.9."), (
        f"read ptf/compute/gang.py against verl {verl.__version__}, then change this line"
    )
    assert {"process_on_nodes", "use_gpu", "max_colocate_count"} <= parameters(RayResourcePool.__init__)
    assert {"placement_groups", "start_bundle_index", "subgroup_world_size", "kwargs"} <= parameters(
        SubRayResourcePool.__init__
    )
    assert {"resource_pool", "ray_cls_with_init", "bin_pack", "kwargs"} <= parameters(RayWorkerGroup.__init__)
    assert "cls" in parameters(RayClassWithInitArgs.__init__)
    source = inspect.getsource(RayWorkerGroup)
    for keyword in ("master_addr", "master_port", "use_gpu", "device_name", "worker_env"):
        assert f'"{keyword}"' in source, f"RayWorkerGroup no longer takes {keyword}"
    pool = RayResourcePool([2, 2], use_gpu=False, max_colocate_count=1)
    assert (pool.world_size, pool.store, pool.pgs) == (4, [2, 2], None)
    pool.pgs = ["placed"]
    assert pool.get_placement_groups() == ["placed"], "places that were reserved beforehand are no longer used"
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(Worker.env_keys())

    class Group(RayWorkerGroup):
        def __init__(self) -> None:
            self._workers = ["a", "b"]

        def _execute_remote_single_worker(
            self, worker: str, method_name: str, *args: Any, **kwargs: Any
        ) -> tuple[Any, ...]:
            return (worker, method_name, *args)

    dealt = Group().execute_all_async("run", ["f", "f"], [[1], [2]])
    assert dealt == [("a", "run", "f", [1]), ("b", "run", "f", [2])], (
        "lists as long as the group are no longer dealt out by rank"
    )
