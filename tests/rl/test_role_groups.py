"""What a group of workers says of itself."""

from types import SimpleNamespace
from typing import Any

from ptf.rl.ray_cluster import VerlRoleGroup


def test_each_worker_is_described_with_its_memory():
    group: Any = object.__new__(VerlRoleGroup)
    group.spec, group.gang = SimpleNamespace(name="policy"), SimpleNamespace(members=["process 7", "process 8"])
    group.memory = lambda: [1.5, 2.0]
    assert group.where() == ["policy process 7 1.50 GiB", "policy process 8 2.00 GiB"]
