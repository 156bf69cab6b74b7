"""The role that generates: its engine sleeps while another role has the devices."""

from types import SimpleNamespace
from typing import Any

from ptf.config.sections.rollout import RolloutConfig
from ptf.rl.engines.protocol import Sampling
from ptf.rl.sampler import Sampler


def test_an_engine_sleeps_between_offload_and_onload():
    told = list[str]()
    sampler: Any = object.__new__(Sampler)
    sampler.engine = SimpleNamespace(sleep=lambda: told.append("sleep"), wake=lambda: told.append("wake"))
    sampler.offload()
    assert told == ["sleep"]
    sampler.onload()
    assert told == ["sleep", "wake"]


def test_responses_are_sampled_from_the_whole_distribution_unless_asked_otherwise():
    assert RolloutConfig().top_p == Sampling(1, 1.0, ()).top_p == 1.0
