"""The role that generates: its engine sleeps while another role has the devices."""

from types import SimpleNamespace
from typing import Any

from ptf.rl.sampler import Sampler


def test_an_engine_sleeps_between_offload_and_onload():
    told = list[str]()
    sampler: Any = object.__new__(Sampler)
    sampler.engine = SimpleNamespace(sleep=lambda: told.append("sleep"), wake=lambda: told.append("wake"))
    sampler.offload()
    assert told == ["sleep"]
    sampler.onload()
    assert told == ["sleep", "wake"]
