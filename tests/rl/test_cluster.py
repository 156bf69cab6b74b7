"""Which role's memory is loaded when, without processes."""

from types import SimpleNamespace

import pytest

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.rl.cluster import LocalCluster, Pool


class Group:
    """A role group that records its calls in a list that all share."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.spec, self.calls = SimpleNamespace(name=name, mesh=MeshSizes()), calls

    def call(self, method: str) -> float | None:
        if method == "peak_memory_gib":
            return 1.0
        self.calls.append(f"{self.spec.name} {method}")
        return None


@pytest.fixture
def calls() -> list[str]:
    return []


def schedule(*roles: tuple[str, ...]) -> LocalCluster:
    cluster = LocalCluster(World(), [Pool(f"pool {n}", frozenset(of), (1,)) for n, of in enumerate(roles)])
    cluster.offloading = {pool.name for pool in cluster.pools}  # as with GPUs
    return cluster


def test_two_roles_of_a_pool_are_loaded_together_and_then_the_second_alone(calls: list[str]) -> None:
    policy, rollout, critic = (Group(name, calls) for name in ("policy", "rollout", "critic"))
    pools = schedule(("policy", "rollout", "critic"))
    with pools.phase(policy, "update"):
        calls.append("update")
    with pools.together(policy, rollout, "sync"):
        calls.append("sync")
    with pools.phase(rollout, "rollout"):
        calls.append("rollout")
    with pools.together(critic, rollout, "values"):
        calls.append("values")
    assert calls == [
        *("policy onload", "update"),
        *("rollout onload", "sync", "policy offload"),
        "rollout",
        *("rollout offload", "critic onload", "rollout onload", "values", "critic offload"),
    ]
    assert pools.loaded == {"pool 0": rollout}


def test_what_another_role_holds_of_the_second_pool_is_freed_first(calls: list[str]) -> None:
    policy, rollout, reward = (Group(name, calls) for name in ("policy", "rollout", "reward_model"))
    pools = schedule(("policy",), ("rollout", "reward_model"))
    with pools.phase(reward, "reward_model"):
        pass
    calls.clear()
    with pools.together(policy, rollout, "sync"):
        calls.append("sync")
    assert calls == ["policy onload", "reward_model offload", "rollout onload", "sync"]
    calls.clear()
    with pools.together(policy, rollout, "sync"):
        calls.append("sync")
    assert calls == ["sync"], "both are loaded, each in its own pool"
    assert pools.loaded == {"pool 0": policy, "pool 1": rollout}
