"""Tiny jobs of every recipe, which write everything that a run writes: seconds each,
with a checkpoint every few steps."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ptf.data.tokenizer import Tokenizer
from tests.tiny import arithmetic, checkpoint

STEPS, EVERY = 6, 2  # of online training, and between its checkpoints


def job(directory: Path) -> dict[str, Any]:
    """SFT: twelve steps on sums, a checkpoint every three, held-out losses."""
    raw = arithmetic(directory, rows=100)
    raw["checkpoint"] = {"every": 3, "keep": 2}
    return raw


def preference(name: str) -> Callable[[Path], dict[str, Any]]:
    """DPO, a reward model or distillation; of some names, what the reference or the teacher says is found before
    training."""

    def made(directory: Path) -> dict[str, Any]:
        from tests.train.test_preferences import preferences

        raw = preferences(directory, name)
        raw["train"] |= {"steps": 9, "validate_every": 3}
        raw["checkpoint"] = {"every": 3, "keep": 2}
        return raw

    return made


def online(recipe: str, algo: Mapping[str, Any]) -> Callable[[Path], dict[str, Any]]:
    """Rollouts by our own decoder, rewards from a process of their own, all other roles in one process."""

    def made(directory: Path) -> dict[str, Any]:
        raw, prompts = arithmetic(directory, rows=80), {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}
        raw["algo"] = dict(algo)
        if recipe == "opd":
            tokenizer = Tokenizer.load(raw["model"]["path"])
            teacher = checkpoint(directory / "teacher", vocab_size=tokenizer.vocab_size, seed=7)
            tokenizer.save(teacher)
            raw["algo"]["teacher"] = str(teacher)
        raw |= {
            "recipe": recipe,
            "checkpoint": {"every": EVERY, "keep": 2},
            "track": {"tensorboard": False, "samples_every": 1, "sample_prompts": 4},
            "rollout": {
                "engine": "native",
                "prompts_per_step": 4,
                "group_size": 4,
                "max_new_tokens": 6,
                "reward": {"use": "tests.rl.plugs:by_length"},
            },
            "evaluate": {"sources": {"dev": prompts}, "limit": 6},
        }
        raw["data"] |= {"sources": {"p": prompts}, "validation": {}}
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


def asynchronous(k: int, episodes: bool = False) -> Callable[[Path], dict[str, Any]]:
    """Return a job of GRPO whose groups are trained up to `k` steps after they were sampled, of single responses or of
    conversations of two turns."""

    def made(directory: Path) -> dict[str, Any]:
        raw = online("grpo", {"num_minibatches": 2})(directory)
        raw["rollout"] |= {
            "max_staleness": k,
            "slice_tokens": 4,
            "generation_batches": 2,
            "max_new_tokens": 16,
            "group_size": 2,
        }
        if episodes:
            del raw["rollout"]["reward"]
            raw["rollout"] |= {"environment": {"use": "tests.rl.environments:Echo"}, "max_turns": 2}
        return raw

    return made


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
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
}
ON_POLICY = ("GRPO", "PPO", "OPD", "GRPO, harness", "GRPO, k = 1", "GRPO, k = 4, episodes")
