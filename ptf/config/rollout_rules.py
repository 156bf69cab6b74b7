"""Rules between the keys of online recipes, which generate what they train on, and of the engines that generate."""

from typing import TYPE_CHECKING

from ptf.config import transports
from ptf.config.recipes import STALENESS_NEEDS_CAP

if TYPE_CHECKING:
    from ptf.config.schema import Job


def rollout_errors(job: "Job") -> list[str]:
    """Return the problems of `rollout` and of what does not go with it."""
    rollout_config = job.rollout
    if rollout_config is None:
        return []
    errors = reward_errors(job) + asynchronous_errors(job)
    if "" in rollout_config.environment and job.evaluate.reward:
        errors.append(
            "evaluate.reward must not be set with rollout.environment, which plays the held-out episodes too and gives "
            "their rewards; remove it"
        )
    if job.data.validation:
        errors.append("data.validation is for recipes without rollouts; held-out prompts are evaluate.sources")
    if job.data.too_long in ("truncate", "split"):
        errors.append("data.too_long: a prompt cannot be cut; use error or drop")
    if rollout_config.top_p < 1 and job.compute.mesh.tensor_parallel_size > 1:
        errors.append(
            "rollout.top_p: a nucleus cannot be cut with compute.mesh.tensor_parallel_size above 1, "
            "where no process has the whole distribution"
        )
    if (
        rollout_config.constrained_decoding
        and rollout_config.constrained_decoding.distinct
        and rollout_config.constrained_decoding.lines_per_response == 1
    ):
        errors.append(
            "rollout.constrained_decoding.distinct has no effect with lines_per_response: 1; raise "
            "lines_per_response or remove distinct"
        )
    if rollout_config.lora_sync == "adapter" and job.model.lora is None:
        errors.append("rollout.lora_sync: adapter needs model.lora")
    if rollout_config.lora_sync == "adapter" and rollout_config.engine not in ("auto", "native", "vllm"):
        errors.append("rollout.lora_sync: adapter is for the engines native and vllm; give merged")
    divisible = rollout_config.engine in ("auto", "vllm") and job.compute.launcher == "ray"
    if rollout_config.tensor_parallel_size > 1 and not divisible:
        errors.append("rollout.tensor_parallel_size: above 1 it is for rollout.engine: vllm and compute.launcher: ray")
    errors += transports.config_errors(job)
    if job.compute.launcher == "local" and rollout_config.replicas > 1:
        errors.append("rollout.replicas must be 1 with compute.launcher: local; use compute.launcher: ray for more")
    if job.compute.launcher == "torchrun":
        errors.append(
            "compute.launcher: torchrun does not support rollouts; use ray, or local with rollout.engine: native"
        )
    if rollout_config.max_new_tokens >= job.data.seq_len:
        errors.append(
            f"rollout.max_new_tokens ({rollout_config.max_new_tokens}) leaves no room for a prompt in data.seq_len "
            f"({job.data.seq_len})"
        )
    return errors


def asynchronous_errors(job: "Job") -> list[str]:
    """Return the problems of `rollout.max_staleness` and its keys with the rest of the job."""
    config = job.rollout
    assert config is not None
    k, fields = config.max_staleness, type(config).model_fields
    if not k:
        keys = ("slice_tokens", "in_flight", "generation_batches", "clock", "update_slices", "environment_slices")
        unused = [name for name in keys if getattr(config, name) != fields[name].default]
        return [f"rollout.{name} has no effect without rollout.max_staleness" for name in unused]
    fewest, most = config.prompts_per_step, config.prompts_per_step * (1 + k)
    problems = {
        "recipe: rollout.max_staleness is supported for grpo, and for recipes of your own, only": (
            isinstance(job.recipe, str) and job.recipe != "grpo"
        ),
        f"algo.tis_cap: {STALENESS_NEEDS_CAP}": (
            # of a plugin, what its own default is is known when it is built
            (job.algo.get("tis_cap", "auto") if isinstance(job.algo, dict) else getattr(job.algo, "tis_cap", None))
            is None
        ),
        "rollout.top_p must be 1 with rollout.max_staleness": config.top_p != 1,
        "rollout.constrained_decoding cannot be used with rollout.max_staleness yet": config.constrained_decoding
        is not None,
        "rollout.max_resampling_rounds cannot be used with rollout.max_staleness yet": config.max_resampling_rounds > 0,
        "rollout.harness cannot be used with rollout.max_staleness yet": config.harness is not None,
        "rollout.episode_timeout_s cannot be used with rollout.max_staleness yet": config.episode_timeout_s is not None,
        "rollout.reward_model cannot be used with rollout.max_staleness yet": config.reward_model is not None,
        f"rollout.in_flight must be from {fewest} (prompts_per_step) to {most} (× (1 + max_staleness))": (
            config.in_flight is not None and not fewest <= config.in_flight <= most
        ),
        "rollout.update_slices and rollout.environment_slices are for rollout.clock: virtual": (
            config.clock == "wall" and (config.update_slices is not None or config.environment_slices > 0)
        ),
        "rollout.generation_batches must be at least rollout.replicas, each of which needs a batch": (
            config.generation_batches < config.replicas
        ),
    }
    return [problem for problem, present in problems.items() if present]


def reward_errors(job: "Job") -> list[str]:
    """Return the problems of the rewards: responses get one, from one place."""
    rollout_config = job.rollout
    assert rollout_config is not None
    of_answers = [f"rollout.{name}" for name in ("reward", "reward_model") if getattr(rollout_config, name)]
    players = [f"rollout.{name}" for name in ("environment", "play", "harness") if getattr(rollout_config, name)]
    if len(players) > 1:
        return [f"{players[1]}: {players[0]} plays the episodes; give one, not both"]
    usual = type(rollout_config).model_fields["max_turns"].default
    if (rollout_config.play or rollout_config.harness) and rollout_config.max_turns != usual:
        return [f"rollout.max_turns limits rollout.environment; {players[0]} decides itself how often it asks"]
    harness = rollout_config.harness
    if harness and bool(harness.command) == bool(harness.agent):
        return ["rollout.harness: give command or agent, and not both"]
    if harness and harness.command and harness.python:
        return ["rollout.harness.python runs agent; a command names its own interpreter"]
    if not of_answers and harness and harness.command:
        return ["rollout.harness.command: the reward of what a program does comes from rollout.reward; give it"]
    if not of_answers and not players:
        return [
            "rollout.reward: responses need a reward; give rollout.reward, reward_model, environment, play or harness"
        ]
    if errors := _unknown_source_errors(job) + _unrewarded_source_errors(job):
        return errors
    if of_answers and "" in rollout_config.environment:
        return [f"{of_answers[0]}: rollout.environment gives the rewards of its episodes; give one, not both"]
    if rollout_config.reward_model and not rollout_config.reward and job.evaluate.sources and not job.evaluate.reward:
        return [
            (
                "evaluate.sources needs evaluate.reward: rollout.reward_model is not used for evaluation, because "
                "the policy may have learned to exploit it"
            )
        ]
    return []


def _unknown_source_errors(job: "Job") -> list[str]:
    """Return the rewards and environments of sources that the job does not have."""
    assert job.rollout is not None
    known = {*job.data.sources, *job.evaluate.sources}
    return [
        f"rollout.{key}.{name}: no source has this name; there are {', '.join(sorted(known))}"
        for key in ("reward", "environment")
        for name in getattr(job.rollout, key)
        if name and name not in known
    ]


def _unrewarded_source_errors(job: "Job") -> list[str]:
    """Return the sources whose responses get no reward, where rewards or environments are given by source."""
    config = job.rollout
    assert config is not None
    named = {*config.reward, *config.environment}
    if not named or "" in named or config.reward_model:
        return []
    trained = {f"data.sources.{name}": name for name in job.data.sources}
    held_out = {} if job.evaluate.reward else {f"evaluate.sources.{name}": name for name in job.evaluate.sources}
    return [
        f"{key}: neither rollout.reward nor rollout.environment has {name}, so its responses get no reward"
        for key, name in {**trained, **held_out}.items()
        if name not in named
    ]


def prompt_errors(job: "Job") -> list[str]:
    """Return the problems of the kinds of sources: prompts are for rollouts and evaluation, which take no others."""
    wants_prompts = {f"evaluate.sources.{n}": s for n, s in job.evaluate.sources.items()}
    errors = []
    if job.rollout:
        wants_prompts |= {f"data.sources.{n}": s for n, s in job.data.sources.items()}
    elif isinstance(job.recipe, str):
        errors += [
            f"data.sources.{n}.kind: prompt is for recipes with rollouts"
            for n, s in job.data.sources.items()
            if s.kind == "prompt"
        ]
    errors += [
        f"{key}.kind must be prompt, not {s.kind}"
        for key, s in wants_prompts.items()
        if s.kind not in ("auto", "prompt")
    ]
    return errors


def pool_errors(job: "Job") -> list[str]:
    """Return the problems of `compute.pools`: policy and rollout must each be in a pool, the same or different ones,
    and no role in more than one.

    Which other roles a job has depends on its recipe; `ptf.rl.job_cluster.pools_of` checks that they are in a pool.
    """
    given = job.compute.pools
    if not given:
        return []
    if not job.rollout:
        return ["compute.pools is for recipes with rollouts; others have one group of compute.workers: remove it"]
    seats = [role for pool in given.values() for role in set(pool.roles)]
    errors = [
        f"compute.pools: role {role} is in more than one"
        for role in sorted({role for role in seats if seats.count(role) > 1})
    ]
    errors += [f"compute.pools: no pool has the role {role}" for role in ("policy", "rollout") if role not in seats]
    errors += [
        f"compute.pools.{name}.offload: vllm cannot be offloaded to disk; give rollout a pool of "
        "its own, or the pool offload: auto"
        for name, pool in given.items()
        if pool.offload == "disk" and "rollout" in pool.roles and job.rollout.engine == "vllm"
    ]
    return errors
