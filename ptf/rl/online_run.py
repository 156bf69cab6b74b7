"""Run an online job: build its roles and prompts, and the controller that trains.

Every problem of the job that can be found without a role is reported before a role is started.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ptf.compute import provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.shutdown import StopSignal
from ptf.compute.world import CPU
from ptf.config import Job, Plugin
from ptf.config.logprob_limits import logprob_limits
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.rollout import RolloutConfig
from ptf.config.transports import advice, with_lora_sync
from ptf.data.sources.rows import fingerprints, first_lines
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.data.trie import Trie
from ptf.errors import Lost, Retryable, UserError, full_text
from ptf.events.catalogue import Catalogue
from ptf.model.sampling import LogitsProcessing
from ptf.model.sizes import sizes_of
from ptf.recipes import registry
from ptf.recipes.protocol import FrozenModelSpec, OnlineRecipe, Recipe
from ptf.rl.cluster import RoleGroup, RoleSpec
from ptf.rl.controller import Controller
from ptf.rl.job_cluster import job_cluster, pools_of, with_offload_path
from ptf.rl.prompts import held_out_prompts, training_prompts
from ptf.rl.rewards.model import RewardModel, RewardModelClient, raise_if_without_score
from ptf.rl.roles import Learner, LogprobModel
from ptf.rl.rollout_role import (
    evaluation_rewards,
    raise_if_cut_responses,
    rollout_functions,
    sampler_spec,
    training_rewards,
    trie_of,
    with_logits_processing,
)
from ptf.rl.validate import affordable
from ptf.rl.weights.verification import SyncError
from ptf.train.components import without_adapters
from ptf.train.frozen_models import backend_of, located, raise_if_other_tokenizer
from ptf.train.job_tokenizer import with_run_rendering
from ptf.train.source_specs import specs
from ptf.train.starting_model import StartingModel, is_own_reference
from ptf.workspace import progress
from ptf.workspace.credentials import redacted


@dataclass(frozen=True)
class Start:
    """The model that an online job starts from."""

    model: ModelConfig
    directory: Path
    tokenizer_path: str


def train_online(job: Job, run: Path, lease: Lease) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one; write `run/model`, a Hugging Face
    directory.

    On Ray, a failed attempt is repeated from the newest checkpoint, at most `compute.restarts` times without a newer
    one.
    """
    saves = Checkpoints.of(job, run)
    failed_at, failures, last_error = -1, 0, ""
    while True:
        try:
            with progress.stage("train"):
                return attempt(job, run, lease)
        except (UserError, SyncError, TimeoutError):
            raise
        except Exception as error:
            newest = saves.latest()
            step = newest[0] if newest else 0
            failures, repeated = (failures + 1, str(error) == last_error) if step == failed_at else (1, False)
            if (
                job.compute.launcher != "ray"
                or failures > job.compute.restarts
                or (repeated and not isinstance(error, Lost))
            ):
                raise
            if StopSignal(run).is_set:
                raise Retryable(f"the run failed after a request to stop: {error}") from error
            failed_at, last_error = step, str(error)
            print(
                f"{redacted(full_text(error))}\nstarted again from step {step} ({failures} of {job.compute.restarts}, "
                "compute.restarts)",
                flush=True,
            )


def attempt(job: Job, run: Path, lease: Lease) -> None:
    """Make one attempt of `train_online`; a failure is raised."""
    rollout_config = job.rollout
    if rollout_config is None:
        raise UserError("an online recipe needs the section rollout; add it to the config")
    recipe = registry.build(job)
    starting = StartingModel.of(job, run)
    tokenizer = starting.load_tokenizer()
    prompts = training_prompts(job, tokenizer)
    if job.evaluate.ranking is not None:  # rewards read the catalogue too
        Catalogue.load(job.evaluate.ranking.catalogue).raise_if_different(tokenizer, "the model's")
    trie = trie_of(rollout_config, tokenizer)
    recipe, processing = with_logits_processing(recipe, rollout_config, trie)
    start = Start(starting.section, starting.with_weights(), starting.tokenizer_path)
    held_out = _held_out(job, tokenizer, trie, start.directory)
    plans = role_specs(job, run, recipe, start, processing, trie)
    pools = pools_of(job.compute.pools, plans)
    made_with = _made_with(job, tokenizer, trie)
    with job_cluster(job, run, pools) as cluster:
        sizes = sizes_of(start.directory, job.model.backend)
        experts = sizes.moe is not None
        if text := sizes.beyond(job.data.seq_len):
            print(f"a response's context of {text}", flush=True)
        job = with_lora_sync(job, cluster.gpu, experts)
        rollout_config = cast("RolloutConfig", job.rollout)
        plans = role_specs(job, run, recipe, start, processing, trie)  # with what is known now of the devices
        groups: dict[str, RoleGroup] = {}
        for role, spec in plans.items():
            groups[role] = cluster.start(with_offload_path(spec, pools, run))
        policy, rollout = groups["policy"], groups["rollout"]
        made_with["packages"] |= policy.call("kernels")
        _print_engine(rollout_config, rollout)
        controller = Controller(
            job,
            cast("OnlineRecipe", recipe),
            prompts,
            held_out,
            cluster,
            policy=policy,
            rollout=rollout,
            logprob_models={role: groups.get(role, policy) for role in recipe.frozen_models},
            critic=groups.get("critic"),
            rewards=training_rewards(job),
            reward_model=_reward_model_client(job, run, plans, groups),
            validation_rewards=evaluation_rewards(job) if job.evaluate.reward else None,
            functions=rollout_functions(job, tokenizer) if rollout_config.max_staleness else None,
            logprob_limits=logprob_limits(job, experts=experts),
            made_with=made_with,
            tokenizer=tokenizer,
            run=run,
            lease=lease,
        )
        _print_transport(job, controller.transport.name, cluster.gpu)
        try:
            controller.run()
            with cluster.phase(policy, "export"):
                lease.check()
                provenance.write(run, made_with)
                policy.call("export", str(run / "model"))
        finally:
            controller.close()


def _print_engine(config: RolloutConfig, rollout: RoleGroup) -> None:
    engine = config.engine.use if isinstance(config.engine, Plugin) else config.engine
    print(
        f"rollout: engine={engine} replicas={config.replicas} tensor_parallel_size={config.tensor_parallel_size} "
        f"{', '.join(rollout.where())}",
        flush=True,
    )


def _print_transport(job: Job, name: str, gpu: bool) -> None:
    assert job.rollout is not None
    sent = f" lora_sync={job.rollout.lora_sync}" if job.model.lora else ""
    print(f"weights: transport={name} dtype={job.train.precision}{sent}", flush=True)
    print("".join(f"{line}\n" for line in advice(job, gpu)), end="", flush=True)


def _held_out(job: Job, tokenizer: Tokenizer, trie: Trie | None, directory: Path) -> dict[str, list[Prompt]]:
    """Return the held-out prompts for validation during training.

    Raises UserError if an allowed response does not fit after one of them.
    """
    held_out: dict[str, list[Prompt]] = {}
    if job.train.validate_every:
        held_out = held_out_prompts(job.evaluate.sources, tokenizer, job.evaluate.prompts)
        held_out, _ = affordable(held_out, job, directory, 1, samples=1)
    if trie is not None:
        lengths = [len(p.tokens) for prompts in held_out.values() for p in prompts]
        raise_if_cut_responses(trie, job, max(lengths, default=0))
    return held_out


def _made_with(job: Job, tokenizer: Tokenizer, trie: Trie | None) -> dict[str, Any]:
    """Print the first lines about the job's sources; return the fingerprints that a resume compares."""
    sources = specs(job.data.sources)
    print("\n".join(first_lines(sources)), flush=True)
    made_with = provenance.made_with(CPU, fingerprints(sources), tokenizer.fingerprint())
    if trie is not None:
        made_with["allowed"] = trie.fingerprint()
    return made_with


def role_specs(
    job: Job, run: Path, recipe: Recipe, start: Start, processing: LogitsProcessing, trie: Trie | None
) -> dict[str, RoleSpec]:
    """Return the roles of the job by name: policy, the recipe's frozen models, critic, reward model and rollout."""
    rollout_config, workers = job.rollout, job.compute.workers
    assert rollout_config is not None
    mesh: dict[str, Any] = {
        "replicate": job.compute.mesh.replicate,
        "tensor_parallel_size": job.compute.mesh.tensor_parallel_size,
    }
    common: dict[str, Any] = {
        "directory": str(start.directory),
        "spec": start.model.model_copy(update={"init": "pretrained"}),
        "seed": job.seed,
        "seq_len": job.data.seq_len,
        "processing": processing,
    }
    learner = {**common, "tokenizer": start.tokenizer_path}
    plans: dict[str, RoleSpec] = {}
    policy = {**learner, "train": job.train, "recipe": recipe}
    plans["policy"] = RoleSpec("policy", Learner, policy, workers, **mesh)
    frozen = {
        "spec": without_adapters(common["spec"]),
        "precision": job.train.precision,
        "compiled": job.train.compile,
        "fused": job.train.fused,
        "micro_batch_sequences": job.train.micro_batch_sequences,
    }
    if job.train.deterministic:
        frozen["seq_len"] = 0
    for role, frozen_model in recipe.frozen_models.items():
        own = _own_model(job, frozen_model, role, start)
        if own or not is_own_reference(start.model):
            plans[role] = RoleSpec(role, LogprobModel, {**common, **frozen, **own}, workers, **mesh)
    if (critic := cast("OnlineRecipe", recipe).critic) is not None:
        train = job.train.model_copy(update={"lr": critic.lr or job.train.lr})
        plans["critic"] = RoleSpec("critic", Learner, {**learner, "train": train, "recipe": critic}, workers, **mesh)
    if rollout_config.reward_model:
        plans["reward_model"] = RoleSpec("reward_model", RewardModel, _reward_model(job), workers, **mesh)
    plans["rollout"] = sampler_spec(
        job,
        start.directory,
        start.tokenizer_path,
        run,
        engine=rollout_config.engine,
        for_training=True,
        engines=rollout_config.replicas,
        length=job.data.seq_len,
        trie=trie,
        adapter=rollout_config.lora_sync == "adapter",
        tensor_parallel_size=rollout_config.tensor_parallel_size,
    )
    return plans


def _own_model(job: Job, frozen_model: FrozenModelSpec, role: str, start: Start) -> dict[str, Any]:
    """Return the directory and config of a frozen model; an empty dict if it is the starting model.

    Raises UserError if its directory is missing, or its tokenizer is not the policy's.
    """
    if frozen_model.path is None:
        return {}
    directory = located(frozen_model, role, job.verify_bytes)
    raise_if_other_tokenizer(directory, start.tokenizer_path, role, frozen_model, start.directory)
    backend = backend_of(directory, job.model.backend)
    return {"directory": str(directory), "spec": ModelConfig(path=str(directory), backend=backend)}


def _reward_model(job: Job) -> dict[str, Any]:
    """Return the arguments of the reward model's role. Raises UserError if it has no scalar head."""
    reward_model = job.rollout and job.rollout.reward_model
    assert reward_model is not None
    directory = located(FrozenModelSpec(reward_model.path), "rollout.reward_model.path", job.verify_bytes)
    raise_if_without_score(directory)
    return {
        "directory": str(directory),
        "spec": ModelConfig(path=str(directory), backend=backend_of(directory, "ptf")),
        "seed": job.seed,
        "precision": job.train.precision,
        "compiled": job.train.compile,
        "fused": job.train.fused,
        "seq_len": 0 if job.train.deterministic else _reward_model_length(job, directory),
        "micro_batch_sequences": job.train.micro_batch_sequences,
    }


def _reward_model_length(job: Job, directory: Path) -> int:
    """Return the largest number of tokens of a conversation. It may exceed `data.seq_len`, since the reward model's
    tokenizer and template may give more tokens than the policy's."""
    return min(sizes_of(directory, backend_of(directory, "ptf")).max_positions, 2 * job.data.seq_len)


def _reward_model_client(
    job: Job, run: Path, plans: dict[str, RoleSpec], groups: dict[str, RoleGroup]
) -> RewardModelClient | None:
    """Return the client that converts responses to the reward model's samples; None without a reward model."""
    reward_model = job.rollout and job.rollout.reward_model
    if not reward_model:
        return None
    directory = Path(plans["reward_model"].kwargs["directory"])
    tokenizer = with_run_rendering(job, Tokenizer.load(str(directory)), run)
    return RewardModelClient(
        groups["reward_model"], tokenizer, _reward_model_length(job, directory), reward_model.weight
    )
