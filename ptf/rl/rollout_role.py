"""Build the rollout role of a job: the engine, the environment, the allowed responses, and the rewards."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ptf import storage
from ptf.config import Job, Plugin, plugin
from ptf.config.plugin_checks import environment_fault
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.rollout import RolloutConfig, SourcePlugin
from ptf.data.tokenizer import Tokenizer
from ptf.data.trie import Trie
from ptf.errors import UserError
from ptf.model.backends import backend_of
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing
from ptf.recipes.protocol import Recipe
from ptf.rl.cluster import RoleSpec
from ptf.rl.engine_settings import WIDTH, EngineSettings
from ptf.rl.engines.protocol import edges_of
from ptf.rl.engines.vllm_support import config_of, raise_if_wrong
from ptf.rl.job_cluster import offload_path
from ptf.rl.rewards.scoring import Rewards, RewardWorkers
from ptf.rl.sampler import Sampler, SamplerSettings

# the key-value cache of a vLLM engine on a CPU has room for so many of the longest contexts, and this size at least
CPU_CONTEXTS, CPU_CACHE_GIB = 4, 0.25


def evaluation_engine(job: Job, gpu: bool, installed: bool, wrong: bool = False) -> str | Plugin:
    """Return the engine that generates held-out responses (`evaluate.engine`).

    `gpu` is whether this machine has a GPU for it, `installed` whether it has vLLM, which cannot run components of the
    user's own, and `wrong` whether it does not serve the model rightly (ptf.rl.engines.vllm_support).
    """
    if job.evaluate.engine != "auto":
        return job.evaluate.engine
    possible = job.compute.launcher == "ray" and not job.model.replace and not wrong
    return "vllm" if gpu and installed and possible else "native"


def sampler_spec(
    job: Job,
    directory: Path,
    tokenizer: str,
    run: Path,
    trie: Trie | None,
    *,
    engine: str | Plugin,
    length: int,
    for_training: bool = False,
) -> RoleSpec:
    """Return the role that generates from a Hugging Face directory.

    `length` is the largest number of tokens of a context and its response together. The engines of training
    (`for_training`) are those of the section `rollout`, begin without a version of the weights and get the policy's by
    a sync; otherwise one engine keeps the directory's. Raises UserError if the model has fewer positions than `length`,
    or if its heads cannot be divided among an engine's processes, or if vLLM does not serve the model rightly.
    """
    rollout = job.rollout or RolloutConfig()
    adapter = for_training and rollout.lora_sync == "adapter"
    replicas, tensor = (rollout.replicas, rollout.tensor_parallel_size) if for_training else (1, 1)
    if engine == "vllm":
        key = "rollout.engine" if for_training else "evaluate.engine"
        raise_if_wrong(key, config_of(directory), job.train.precision, synced=for_training and not adapter)
    shape = backend_of(job.model.backend).decoder_config(directory)
    positions = shape.max_positions
    if length > positions:
        raise UserError(
            f"prompt and response may take {length} tokens together, but {directory} has {positions} positions; "
            "lower data.seq_len or max_new_tokens"
        )
    if shape.heads % tensor:
        raise UserError(
            f"rollout.tensor_parallel_size: {shape.heads} attention heads cannot be divided among {tensor} processes; "
            f"use a divisor of {shape.heads}"
        )
    raise_if_wrong_environments(rollout)
    env, cache_gib = dict[str, str](), CPU_CACHE_GIB
    if engine == "vllm":
        from ptf.rl.engines.vllm_engine import engine_env

        env = engine_env(run / "vllm")
        cache_gib = max(cache_gib, CPU_CONTEXTS * length * shape.cache_elements * WIDTH[job.train.precision] / 2**30)
    settings = EngineSettings(
        kind=engine,
        directory=str(directory),
        version=-1 if for_training else 0,
        seed=job.seed,
        precision=job.train.precision,
        max_length=length,
        model=job.model,
        adapter=adapter,
        # agents think between their requests; where a run must repeat, all wait for all
        continuous=rollout.harness is not None and not job.train.deterministic,
        constrained_decoding=trie is not None,
        tensor_parallel_size=tensor,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cpu_kv_cache_gib=cache_gib,
        offload_path=offload_path(job, run, "rollout") if for_training else None,
    )
    sampler = SamplerSettings(
        engine=settings,
        tokenizer=tokenizer,
        rollout=rollout,
        timeout_s=job.compute.timeout_s,
        vocabulary=shape.vocab,
        trie=trie,
    )
    return RoleSpec("rollout", Sampler, sampler, MeshSizes(replicate=replicas, tensor=tensor), env)


def raise_if_wrong_environments(rollout: RolloutConfig) -> None:
    """Raise UserError for a class without the methods of an environment; what a function makes is checked later."""
    for source, what in rollout.environment.items():
        target = plugin.resolve(what.use)
        if isinstance(target, type) and (fault := environment_fault(target)):
            key = f"rollout.environment.{source}" if source else "rollout.environment"
            raise UserError(f"{key}: {what.use} {fault}")


def trie_of(rollout_config: RolloutConfig | None, tokenizer: Tokenizer) -> Trie | None:
    """Return the trie of the allowed responses (`rollout.constrained_decoding`); None if any response is allowed."""
    if rollout_config is None or rollout_config.constrained_decoding is None:
        return None
    text = storage.read_text(rollout_config.constrained_decoding.path).replace("\r\n", "\n").removesuffix("\n")
    lines = text.split("\n") if text else []
    try:
        return Trie.of(
            (tokenizer.encode(line) for line in lines),
            tokenizer.stop_ids,
            rollout_config.constrained_decoding.lines_per_response,
            rollout_config.constrained_decoding.distinct,
        )
    except UserError as error:
        raise UserError(
            f"rollout.constrained_decoding.path: {rollout_config.constrained_decoding.path}: {error}"
        ) from error


def raise_if_cut_responses(trie: Trie, job: Job, longest_prompt: int) -> None:
    """Raise UserError if an allowed response is longer than the limits of training or of evaluation."""
    rooms = {"rollout.max_new_tokens": job.online_rollout.max_new_tokens}
    if job.evaluate.sources:
        rooms["evaluate.max_new_tokens"] = job.evaluate.max_new_tokens
        if job.train.validate_every:
            rooms["data.seq_len less the longest held-out prompt"] = job.data.seq_len - longest_prompt
    for key, room in rooms.items():
        if trie.longest > room:
            raise UserError(
                f"rollout.constrained_decoding: its longest response has {trie.longest} tokens with the one that "
                "ends it, "
                f"but {key} is {room}"
            )


def with_logits_processing(
    recipe: Recipe, rollout_config: RolloutConfig, trie: Trie | None
) -> tuple[Recipe, LogitsProcessing]:
    """Return the recipe with the distribution of the sampled responses in its context, and that distribution.

    Raises UserError if the distribution is not the model's own and the recipe does not read it.
    """
    processing = LogitsProcessing(
        rollout_config.temperature, rollout_config.top_p, None if trie is None else edges_of(trie)
    )
    if processing.top_p < 1 and recipe.needs_old_logprobs:
        raise UserError(
            "rollout.top_p must be 1: the recipe needs the old policy's log-probs, "
            "and the nucleus of one policy is not that of another"
        )
    if processing != NO_LOGITS_PROCESSING and not recipe.reads_processing:
        raise UserError(
            "rollout.temperature, rollout.top_p and rollout.constrained_decoding: the loss of the recipe is not that "
            "of the distribution that responses are sampled from. Use `context.processing` in it and set "
            "`reads_processing = True` in its class, or leave the three keys at 1, 1 and null"
        )
    return replace(recipe, context=replace(recipe.context, processing=processing)), processing


def evaluation_rewards(job: Job) -> Rewards:
    """Return the processes that score held-out responses: by `evaluate.reward`, otherwise as in training."""
    if reward := job.evaluate.reward:
        return rewards_of(job, {"": SourcePlugin(use=reward.use, args=reward.args)})
    return rewards_of(job, job.rollout.reward if job.rollout else {})


def rewards_of(job: Job, by_source: Mapping[str, SourcePlugin]) -> Rewards:
    """Return the processes that score responses by these reward functions."""
    rollout = job.rollout or RolloutConfig()
    new = partial(
        RewardWorkers,
        within_s=job.compute.timeout_s,
        timeout_s=rollout.reward_timeout_s,
        processes=rollout.reward_processes,
        retries=rollout.reward_retries,
    )
    return Rewards({source: (new(what.plugin), what.weight) for source, what in by_source.items()})
