"""From an online job to a running controller: its cluster, its roles, its prompts; and to one rollout role alone, for evaluation."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ptf import recipes
from ptf.compute import provenance
from ptf.compute.launch import default_threads
from ptf.compute.world import CPU, joined
from ptf.config import Job, Plug
from ptf.config.schema import ModelConfig, PPOAlgo, Source
from ptf.data.pipeline import prompts_once, prompts_stream
from ptf.data.sources import fingerprints
from ptf.data.stream import Stream
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.vocabulary import refuse_larger_tokenizer
from ptf.recipes import Companion, Online
from ptf.rl.cluster import Cluster, LocalCluster, RoleSpec
from ptf.rl.controller import Controller
from ptf.rl.rewards import Rewards
from ptf.rl.roles import EnvironmentSpec, Learner, Sampler, Scorer
from ptf.train.companions import located, refuse_other_tokenizer
from ptf.train.parts import unadapted
from ptf.train.reading import specs
from ptf.train.start import extended, own_reference, start_directory, tokenizer_directory

CHECKED = 10_000  # prompts of each source whose length is looked at before training starts


@contextlib.contextmanager
def clustered(job: Job, run: Path, roles: int, local: bool = False) -> Iterator[Cluster]:
    """Where this job's roles live: Ray actors, or (launcher local, or `local`) this process."""
    compute = job.compute
    threads = compute.threads or default_threads(1)
    if local or compute.launcher == "local":
        with joined(compute.device, compute.timeout_s, threads=threads) as world:
            yield LocalCluster(world)
    elif compute.launcher == "ray":
        from ptf.compute.ray_session import ray_session
        from ptf.rl.verl_cluster import VerlCluster

        with ray_session(address=compute.address, workdir=run, cpus=roles, timeout_s=min(compute.timeout_s, 300)):
            cluster = VerlCluster(device=compute.device, threads=compute.threads, timeout_s=compute.timeout_s)
            try:
                yield cluster
            finally:
                cluster.close()
    else:
        raise UserError("compute.launcher: torchrun runs offline recipes only; use ray or local for rollouts")


def sampler_spec(job: Job, directory: Path, tokenizer: str, run: Path, *, engine: str | Plug, version: int, workers: int, length: int) -> RoleSpec:
    """One role that generates from a Hugging Face directory, up to `length` tokens in all. Raises UserError if the model has fewer positions."""
    options: dict[str, object] = {}
    positions = bridge.shape(directory, job.model.backend).max_positions
    if length > positions:
        raise UserError(f"prompt and answer may take {length} tokens together, but {directory} has {positions} positions; lower data.seq_len or max_new_tokens")
    env: dict[str, str] = {}
    if engine == "vllm":
        from ptf.rl.vllm_engine import engine_env

        options = {"kv_cache_gib": job.rollout.kv_cache_gib if job.rollout else 0.25}
        env = engine_env(run / "vllm")
    if engine == "native":
        options = {"spec": job.model}
    if job.rollout and (what := job.rollout.environment):
        knobs = job.rollout
        options["environment"] = EnvironmentSpec(what, knobs.max_turns, knobs.processes, knobs.reward_timeout_s, knobs.retries)
    kwargs = {
        "engine": engine, "directory": str(directory), "tokenizer": tokenizer, "version": version, "seed": job.seed, "precision": job.train.precision,
        "max_length": length, "timeout_s": job.compute.timeout_s, **options,
    }  # fmt: skip
    return RoleSpec("rollout", Sampler, kwargs, workers, env)


def refuse_too_long(prompt: Prompt, room: int) -> None:
    if len(prompt.tokens) > room:
        raise UserError(
            f"a prompt of source {prompt.source} has {len(prompt.tokens)} tokens; data.seq_len leaves {room} beside rollout.max_new_tokens "
            "(data.too_long: drop leaves such prompts out)"
        )


class Fitting:
    """Stream[Prompt]: those that leave room for an answer; the others are left out and counted, or refused."""

    def __init__(self, prompts: Stream[Prompt], room: int, drop: bool) -> None:
        self.prompts, self.room, self.drop, self.dropped = prompts, room, drop, 0

    def __next__(self) -> Prompt:
        for _ in range(100_000):
            prompt = next(self.prompts)
            if len(prompt.tokens) <= self.room:
                return prompt
            if not self.drop:
                refuse_too_long(prompt, self.room)
            self.dropped += 1
        raise UserError(f"100,000 prompts one after the other are longer than the {self.room} tokens that data.seq_len leaves beside rollout.max_new_tokens")

    def state_dict(self) -> dict:
        return {"prompts": self.prompts.state_dict(), "dropped": self.dropped}

    def load_state_dict(self, state: Mapping) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.dropped = int(state["dropped"])


def held_out_prompts(sources: Mapping[str, Source], tokenizer: Tokenizer, limit: int) -> dict[str, list[Prompt]]:
    return {name: list(itertools.islice(prompts_once(spec, name, tokenizer), limit)) for name, spec in specs(sources).items()}


def rewards_of(job: Job, reward: Plug | None) -> Rewards | None:
    """What scores with it; None if there is none."""
    if reward is None:
        return None
    knobs = job.rollout
    within = job.compute.timeout_s
    if knobs is None:
        return Rewards(reward, within_s=within)
    return Rewards(reward, knobs.reward_timeout_s, processes=knobs.processes, retries=knobs.retries, within_s=within)


def start_of(one: Companion, role: str, tokenizer: str, model: Path) -> dict[str, Any]:
    """What a model of its own is loaded from. Raises UserError if it is not there, or reads other tokens than the policy does."""
    place = located(one, role)
    refuse_other_tokenizer(place, tokenizer, role, one, model)
    return {"directory": str(place), "spec": ModelConfig(path=str(place))}


def fit_online(job: Job, run: Path) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one; leaves `run/model`, a Hugging Face directory."""
    knobs = job.rollout
    if knobs is None:
        raise UserError("an online recipe needs the section rollout")
    recipe = recipes.build(job)
    evaluation = job.evaluate.reward
    directory = bridge.locate(job.model.path, job.model.revision)
    model, directory = extended(job.model, directory, run, job.seed)
    tokenizer_path = tokenizer_directory(model, directory, run)
    tokenizer = Tokenizer.load(tokenizer_path)
    refuse_larger_tokenizer(directory, tokenizer_path, tokenizer.vocab_size)
    room = job.data.seq_len - knobs.max_new_tokens
    drop = job.data.too_long == "drop"
    sources = specs(job.data.sources)
    drawn = prompts_stream(sources, tokenizer=tokenizer, seed=job.seed, shuffle=job.data.shuffle, temperature=job.data.mix.temperature)
    prompts = Fitting(drawn, room, drop)
    if not drop:  # better now than in the middle of the night
        for name, spec in sources.items():
            for prompt in itertools.islice(prompts_once(spec, name, tokenizer), CHECKED):
                refuse_too_long(prompt, room)
    temperature = getattr(recipe, "temperature", knobs.temperature)
    if temperature != knobs.temperature:
        raise UserError(f"rollout.temperature is {knobs.temperature:g}, but the recipe's loss takes its log-probs at {temperature:g}; give both the same")
    held_out = held_out_prompts(job.evaluate.sources, tokenizer, job.evaluate.limit) if job.train.validate_every else {}
    start = start_directory(model, directory, run, tokenizer_path, job.seed)
    workers = job.compute.workers
    mesh: dict[str, Any] = {"replicate": job.compute.mesh.replicate, "tensor": job.compute.mesh.tensor}
    common = {
        "directory": str(start),
        "spec": model.model_copy(update={"init": "pretrained"}),
        "seed": job.seed,
        "width": job.data.seq_len,
        "temperature": knobs.temperature,
    }
    frozen = {"spec": unadapted(common["spec"]), "precision": job.train.precision, "micro_rows": job.train.micro_rows}
    own = {role: start_of(one, role, tokenizer_path, start) for role, one in recipe.companions.items() if one.path is not None}
    made_with = provenance.made_with(CPU, fingerprints(sources), tokenizer.fingerprint())
    with clustered(job, run, workers * 3 + knobs.workers) as cluster:
        policy = cluster.start(RoleSpec("policy", Learner, {**common, "tokenizer": tokenizer_path, "train": job.train, "recipe": recipe}, workers, **mesh))
        scorers = {
            role: policy if role not in own and own_reference(model)
            else cluster.start(RoleSpec(role, Scorer, {**common, **frozen, **own.get(role, {})}, workers, **mesh))
            for role in recipe.companions
        }  # fmt: skip
        critic = None
        if (trained_by := cast("Online", recipe).critic) is not None:
            lr = job.algo.critic_lr if isinstance(job.algo, PPOAlgo) else None
            train = job.train.model_copy(update={"lr": lr or job.train.lr})
            critic = cluster.start(RoleSpec("critic", Learner, {**common, "tokenizer": tokenizer_path, "train": train, "recipe": trained_by}, workers, **mesh))
        spec = sampler_spec(job, start, tokenizer_path, run, engine=knobs.engine, version=-1, workers=knobs.workers, length=job.data.seq_len)
        rollout = cluster.start(spec)
        engine = knobs.engine.use if isinstance(knobs.engine, Plug) else knobs.engine
        print(f"rollout: engine={engine} workers={knobs.workers} {', '.join(rollout.where())}", flush=True)
        judge = rewards_of(job, evaluation)
        controller = Controller(
            job, cast("Online", recipe), prompts, held_out, cluster, policy=policy, rollout=rollout, scorers=scorers, critic=critic,
            rewards=rewards_of(job, knobs.reward), judge=judge, made_with=made_with, tokenizer=tokenizer, run=run,
        )  # fmt: skip
        try:
            controller.run()
            with cluster.phase(policy, "export"):
                provenance.write(run, made_with)
                policy.call("export", str(run / "model"))
        finally:
            controller.close()
