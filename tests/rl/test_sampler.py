"""The role that generates: its engine sleeps while another role has the devices."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from ptf.compute.world import World
from ptf.errors import UserError
from ptf.model.fused import kernels
from ptf.rl.engines.protocol import Sampling
from ptf.rl.sampler import Sampler, make_engine
from tests.tiny import checkpoint


def test_an_engine_sleeps_between_offload_and_onload():
    told = list[str]()
    sampler: Any = object.__new__(Sampler)
    sampler.engine = SimpleNamespace(sleep=lambda: told.append("sleep"), wake=lambda: told.append("wake"))
    sampler.offload()
    assert told == ["sleep"]
    sampler.onload()
    assert told == ["sleep", "wake"]


def test_responses_are_sampled_from_the_whole_distribution_unless_asked_otherwise():
    assert inspect.signature(Sampler.__init__).parameters["top_p"].default == Sampling(1, 1.0, ()).top_p == 1.0


def test_the_native_engine_has_the_kernels_of_the_job_and_those_of_the_policy(tmp_path):
    directory, world = str(checkpoint(tmp_path / "m")), World()
    of_policy = kernels("auto", world.device, "fp32").get("cpu_kernels")
    for setting, version in (("auto", of_policy), ([], None)):
        sampler: Any = object.__new__(Sampler)
        sampler.native = True
        sampler.engine = make_engine(
            "native", directory, world, version=0, seed=0, precision="fp32", max_length=64, fused=setting
        )
        assert sampler.engine.by_kernels == (version is not None)
        sampler.require_kernels(version)
        with pytest.raises(UserError, match="the policy with cpu_kernels \\(another\\); give the machines"):
            sampler.require_kernels("another")
        sampler.native = False  # an engine of another kind has none of its own
        sampler.require_kernels("another")
