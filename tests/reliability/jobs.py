"""Tiny jobs of every recipe, which write everything that a run writes: seconds each,
with a checkpoint every few steps."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ptf.data.tokenizer import Tokenizer
from tests.tiny import arithmetic, checkpoint
from tests.tiny import online as tiny_online

STEPS, EVERY = 6, 2  # of online training, and between its checkpoints
Job = Callable[[Path], dict[str, Any]]  # the config of a run, whose files are made in a directory


def job(directory: Path) -> dict[str, Any]:
    """SFT: twelve steps on sums, a checkpoint every three, held-out losses."""
    raw = arithmetic(directory, rows=100)
    raw["checkpoint"] = {"every": 3, "keep": 2}
    return raw


def preference(name: str) -> Job:
    """DPO, a reward model or distillation; of some names, what the reference or the teacher says is found before
    training."""

    def made(directory: Path) -> dict[str, Any]:
        from tests.train.test_preferences import preferences

        raw = preferences(directory, name)
        raw["train"] |= {"steps": 9, "validate_every": 3}
        raw["checkpoint"] = {"every": 3, "keep": 2}
        return raw

    return made


def online(recipe: str, algo: Mapping[str, Any]) -> Job:
    """Rollouts by our own decoder, rewards from a process of their own, all other roles in one process."""

    def made(directory: Path) -> dict[str, Any]:
        raw = arithmetic(directory, rows=80)
        raw["algo"] = dict(algo)
        if recipe == "opd":
            tokenizer = Tokenizer.load(raw["model"]["path"])
            teacher = checkpoint(directory / "teacher", vocab_size=tokenizer.vocab_size, seed=7)
            tokenizer.save(teacher)
            raw["algo"]["teacher"] = str(teacher)
        raw = tiny_online(raw, directory) | {
            "recipe": recipe,
            "checkpoint": {"every": EVERY, "keep": 2},
            "track": {"tensorboard": False, "samples_every": 1, "sample_prompts": 4},
        }
        raw["evaluate"] = {"sources": {"dev": raw["data"]["sources"]["p"]}, "limit": 6}
        raw["train"] |= {"steps": STEPS, "validate_every": 3}
        return raw

    return made


def harness(directory: Path) -> dict[str, Any]:
    """GRPO of an agent that asks over HTTP, from a process of its own."""
    raw = online("grpo", {"num_minibatches": 2})(directory)
    raw["train"]["deterministic"] = True
    del raw["rollout"]["reward"], raw["evaluate"]
    raw["rollout"]["harness"] = {"agent": {"use": "tests.rl.plugs:agent"}, "python": sys.executable}
    return raw


def asynchronous(k: int, episodes: bool = False, *, replicas: int = 0, wall: bool = False) -> Job:
    """Return a job of GRPO whose groups are trained up to `k` steps after they were sampled, of single responses or of
    conversations of two turns.

    With `replicas`, policy and engines have pools of their own; with more than one, on a Ray of the run's own. With
    `wall`, slices take what has arrived, from environments that take another while each time.
    """

    def made(directory: Path) -> dict[str, Any]:
        raw = online("grpo", {"num_minibatches": 2})(directory)
        raw["rollout"] |= {"max_new_tokens": 16, "group_size": 2}
        if k:
            raw["rollout"] |= {"max_staleness": k, "slice_tokens": 4, "generation_batches": 2}
        if episodes:
            del raw["rollout"]["reward"]
            environment = f"tests.rl.environments:{'Dawdling' if wall else 'Terse'}"
            raw["rollout"] |= {"environment": {"use": environment}, "max_turns": 2}
        if wall:
            raw["rollout"]["clock"] = "wall"
        if replicas:
            raw["compute"] |= {"pools": {"training": {"roles": ["policy"]}, "sampling": {"roles": ["rollout"]}}}
        if replicas > 1:
            raw["rollout"]["replicas"] = replicas
            raw["compute"] |= {"launcher": "ray", "workers": 1, "threads": 1, "timeout_s": 200}
        return raw

    return made


TWO_REPLICAS = {  # k, and whether episodes are sampled
    "GRPO, two replicas": (0, False),
    "GRPO, episodes, two replicas": (0, True),
    "GRPO, k = 1, two replicas": (1, False),
    "GRPO, k = 1, episodes, two replicas": (1, True),
    "GRPO, k = 4, two replicas": (4, False),
    "GRPO, k = 4, episodes, two replicas": (4, True),
}
JOBS: dict[str, Job] = {
    "SFT": job,
    "DPO": preference("dpo"),
    "DPO, reference found ahead": preference("dpo ahead"),
    "RM": preference("rm"),
    "KD": preference("kd"),
    "KD, teacher asked ahead": preference("kd ahead"),
    "GRPO": online("grpo", {"num_minibatches": 2, "kl_coef": 0.01}),
    "PPO": online("ppo", {"num_minibatches": 2, "critic_lr": 3e-3, "kl_coef": 0.01}),
    "OPD": online("opd", {"num_minibatches": 2}),
    "GRPO, harness": harness,
    "GRPO, k = 1": asynchronous(1),
    "GRPO, k = 4, episodes": asynchronous(4, episodes=True),
    "GRPO, episodes": asynchronous(0, episodes=True),
    "GRPO, k = 1, episodes": asynchronous(1, episodes=True),
    "GRPO, k = 4": asynchronous(4),
    **{name: asynchronous(k, episodes, replicas=2) for name, (k, episodes) in TWO_REPLICAS.items()},
    "GRPO, k = 1, episodes, wall": asynchronous(1, episodes=True, replicas=1, wall=True),
    "GRPO, k = 4, episodes, wall": asynchronous(4, episodes=True, replicas=1, wall=True),
}
# of a job with two replicas on Ray, the same with one in the run's own process
ONE_REPLICA: dict[str, Job] = {
    name: asynchronous(k, episodes, replicas=1) for name, (k, episodes) in TWO_REPLICAS.items()
}
ON_POLICY = tuple(name for name in JOBS if name.startswith(("GRPO", "PPO", "OPD")))
