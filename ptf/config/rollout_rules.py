"""Rules between the keys of online recipes, which generate what they train on, and of the engines that generate."""

from typing import TYPE_CHECKING

from ptf.config import transports
from ptf.config.recipes import STALENESS_NEEDS_CAP
from ptf.config.section import Rules

if TYPE_CHECKING:
    from ptf.config.schema import Job
    from ptf.config.sections.rollout import RolloutConfig


def rollout_rules(job: "Job", rollout: "RolloutConfig") -> Rules:
    """Return the rules of `rollout` and of what does not go with it."""
    launcher = job.compute.launcher
    decoding, divisible = rollout.constrained_decoding, rollout.engine in ("auto", "vllm") and launcher == "ray"
    return {
        **reward_rules(job, rollout),
        **source_rules(job, rollout),
        **asynchronous_rules(job, rollout),
        **pool_rules(job, rollout),
        "evaluate.reward must not be set with rollout.environment, which plays the held-out episodes too and gives "
        "their rewards; remove it": "" in rollout.environment and job.evaluate.reward,
        "data.validation is for recipes without rollouts; held-out prompts are evaluate.sources": job.data.validation,
        "data.too_long: a prompt cannot be cut; use error or drop": job.data.too_long in ("truncate", "split"),
        "rollout.top_p: a nucleus cannot be cut with compute.mesh.tensor_parallel_size or context_parallel_size above "
        "1, where no process has the whole distribution; use 1.0": rollout.top_p < 1
        and job.compute.mesh.sizes(job.compute.workers).model > 1,
        "rollout.constrained_decoding.distinct has no effect with lines_per_response: 1; raise lines_per_response or "
        "remove distinct": decoding and decoding.distinct and decoding.lines_per_response == 1,
        "rollout.lora_sync: adapter needs model.lora": rollout.lora_sync == "adapter" and job.model.lora is None,
        "rollout.lora_sync: adapter is for the engines native and vllm; give merged": rollout.lora_sync == "adapter"
        and rollout.engine not in ("auto", "native", "vllm"),
        "rollout.tensor_parallel_size: above 1 it is for rollout.engine: vllm and compute.launcher: ray": (
            rollout.tensor_parallel_size > 1 and not divisible
        ),
        **transports.config_rules(job),
        "rollout.replicas must be 1 with compute.launcher: local; use compute.launcher: ray for more": (
            launcher == "local" and rollout.replicas > 1
        ),
        "compute.launcher: torchrun does not support rollouts; use ray, or local with rollout.engine: native": (
            launcher == "torchrun"
        ),
        f"rollout.max_new_tokens ({rollout.max_new_tokens}) leaves no room for a prompt in data.seq_len "
        f"({job.data.seq_len})": rollout.max_new_tokens >= job.data.seq_len,
    }


def asynchronous_rules(job: "Job", rollout: "RolloutConfig") -> Rules:
    """Return the rules of `rollout.max_staleness` and its keys."""
    k, fields = rollout.max_staleness, type(rollout).model_fields
    if not k:
        keys = ("slice_tokens", "in_flight", "generation_batches", "clock", "update_slices", "environment_slices")
        return {
            f"rollout.{name} has no effect without rollout.max_staleness": getattr(rollout, name)
            != fields[name].default
            for name in keys
        }
    fewest, most = rollout.prompts_per_step, rollout.prompts_per_step * (1 + k)
    return {
        "recipe: rollout.max_staleness is supported for grpo, and for recipes of your own, only": (
            isinstance(job.recipe, str) and job.recipe != "grpo"
        ),
        f"algo.tis_cap: {STALENESS_NEEDS_CAP}": (
            # of a plugin, what its own default is is known when it is built
            (job.algo.get("tis_cap", "auto") if isinstance(job.algo, dict) else getattr(job.algo, "tis_cap", None))
            is None
        ),
        "rollout.top_p must be 1 with rollout.max_staleness": rollout.top_p != 1,
        **{
            f"rollout.{name} cannot be used with rollout.max_staleness yet": getattr(rollout, name)
            for name in (
                "constrained_decoding",
                "max_resampling_rounds",
                "harness",
                "episode_timeout_s",
                "reward_model",
            )
        },
        f"rollout.in_flight must be from {fewest} (prompts_per_step) to {most} (× (1 + max_staleness))": (
            rollout.in_flight is not None and not fewest <= rollout.in_flight <= most
        ),
        "rollout.update_slices and rollout.environment_slices are for rollout.clock: virtual": (
            rollout.clock == "wall" and (rollout.update_slices is not None or rollout.environment_slices > 0)
        ),
        "rollout.generation_batches must be at least rollout.replicas, each of which needs a batch": (
            rollout.generation_batches < rollout.replicas
        ),
    }


def reward_rules(job: "Job", rollout: "RolloutConfig") -> Rules:
    """Return the rules of the rewards: responses get one, from one place."""
    of_answers = [f"rollout.{name}" for name in ("reward", "reward_model") if getattr(rollout, name)]
    players = [f"rollout.{name}" for name in ("environment", "play", "harness") if getattr(rollout, name)]
    player, another = [*players, "", ""][:2]
    harness, usual = rollout.harness, type(rollout).model_fields["max_turns"].default
    program = harness if harness and harness.command and not harness.agent else None
    return {
        f"{another}: {player} plays the episodes; give one, not both": another,
        f"rollout.max_turns limits rollout.environment; {player} decides itself how often it asks": (
            (rollout.play or harness) and not another and rollout.max_turns != usual
        ),
        "rollout.harness: give command or agent, and not both": harness
        and bool(harness.command) == bool(harness.agent),
        "rollout.harness.python runs agent; a command names its own interpreter": program and program.python,
        "rollout.harness.command: the reward of what a program does comes from rollout.reward; give it": program
        and not of_answers,
        "rollout.reward: responses need a reward; give rollout.reward, reward_model, environment, play or harness": (
            not of_answers and not players
        ),
        **{
            f"{key}: rollout.environment gives the rewards of its episodes; give one, not both": ""
            in rollout.environment
            for key in of_answers
        },
        "evaluate.sources needs evaluate.reward: rollout.reward_model is not used for evaluation, because the policy "
        "may have learned to exploit it": of_answers == ["rollout.reward_model"]
        and "" not in rollout.environment
        and job.evaluate.sources
        and not job.evaluate.reward,
    }


def source_rules(job: "Job", rollout: "RolloutConfig") -> Rules:
    """Return the rules of rewards and environments by source: each source exists, and its responses get one."""
    named, trained, held_out = {*rollout.reward, *rollout.environment}, job.data.sources, job.evaluate.sources
    by_source = bool(named) and "" not in named and not rollout.reward_model
    keys = {f"data.sources.{name}": name for name in trained}
    keys |= {} if job.evaluate.reward else {f"evaluate.sources.{name}": name for name in held_out}
    return {
        f"rollout.{key}.{name}: no source has this name; there are {', '.join(sorted({*trained, *held_out}))}": name
        and name not in {*trained, *held_out}
        for key in ("reward", "environment")
        for name in getattr(rollout, key)
    } | {
        f"{key}: neither rollout.reward nor rollout.environment has {name}, so its responses get no reward": by_source
        and name not in named
        for key, name in keys.items()
    }


def pool_rules(job: "Job", rollout: "RolloutConfig") -> Rules:
    """Return the rules of `compute.pools`: policy and rollout must each be in a pool, the same or different ones, and
    no role in more than one.

    Which other roles a job has depends on its recipe; `ptf.rl.job_cluster.pools_of` checks that they are in a pool.
    """
    pools = job.compute.pools
    seats = [role for pool in pools.values() for role in set(pool.roles)]
    return {
        **{f"compute.pools: role {role} is in more than one": seats.count(role) > 1 for role in sorted(seats)},
        **{
            f"compute.pools: no pool has the role {role}": pools and role not in seats for role in ("policy", "rollout")
        },
        **{
            f"compute.pools.{name}.offload: vllm cannot be offloaded to disk; give rollout a pool of its own, or the "
            "pool offload: auto": pool.offload == "disk" and "rollout" in pool.roles and rollout.engine == "vllm"
            for name, pool in pools.items()
        },
    }
