"""Killed in any phase of a step, the run goes on as if it never had been: nothing is lost,
trained twice or sampled otherwise."""

import os
import signal
import textwrap

import pytest
import yaml

from tests.child import run_python
from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_controller import train
from tests.rl.test_pools import left

# one after the other, in the steps after 1, 2, …
PHASES = ["rollout", "reward", "logprobs", "reference", "update", "sync", "save"]
KILLED = """
    import os, signal, sys, threading
    from ptf.compute import checkpoint
    from ptf.config import load
    from ptf.rl.cluster import LocalRoleGroup
    from ptf.rl.rewards.scoring import GroupScoring
    from ptf.run import run

    phase, step = sys.argv[2], int(sys.argv[3])
    methods = {"rollout": "rollout", "logprobs": "logprobs", "reference": "logprobs", "update": "update",
               "sync": "load", "save": "save"}
    at, call, score = [0], LocalRoleGroup.call, GroupScoring.finish

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def killing(self, method, *args, **options):
        if method == "update":
            at[0] = args[1]
        here = at[0] == step if phase in ("sync", "save") else True
        if method == "rollout":
            at[0] = args[1]
        role = "reference" if phase == "reference" else "rollout" if phase in ("rollout", "sync") else "policy"
        done = call(self, method, *args, **options)
        if here and at[0] == step and method == methods.get(phase) and self.spec.name == role:
            die()
        return done

    def scoring(begun, groups):
        if phase == "reward" and at[0] == step:
            die()
        return score(begun, groups)

    LocalRoleGroup.call, GroupScoring.finish = killing, scoring
    run(load(sys.argv[1]), "killed")
"""


@pytest.mark.cluster
def test_a_run_that_is_killed_in_every_phase_ends_as_one_that_is_not(raw, tmp_path):
    raw = {
        **raw,
        "algo": {"num_minibatches": 2, "kl_coef": 0.01},
        "track": {"tensorboard": False, "samples_every": 1, "sample_prompts": 8},
        "checkpoint": {"every": 1},
    }
    raw["train"] = {**raw["train"], "steps": len(PHASES) + 1, "validate_every": 0}
    script, job = tmp_path / "killed.py", tmp_path / "job.yaml"
    script.write_text(textwrap.dedent(KILLED))
    job.write_text(yaml.safe_dump(raw))
    for step, phase in enumerate(PHASES):
        done = run_python(script, job, phase, step, env={**os.environ, "PYTHONPATH": os.getcwd()})
        assert done.returncode == -signal.SIGKILL, f"{phase}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert left(train(raw, "killed")) == left(train(raw, "whole"))
