"""From an online job to a running controller: its cluster, its roles, its prompts; and to one rollout role alone, for evaluation."""

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from ptf import recipes, storage
from ptf.compute import provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.launch import default_threads
from ptf.compute.lease import Lease
from ptf.compute.leave import Requests
from ptf.compute.world import CPU, joined
from ptf.config import Job, Plug
from ptf.config.schema import ModelConfig, PoolConfig, PPOAlgo, RolloutConfig, Source
from ptf.credentials import redacted
from ptf.data.catalogue import Catalogue
from ptf.data.passes import of_prompts
from ptf.data.pipeline import prompts_once, prompts_stream
from ptf.data.sources import fingerprints, first_lines
from ptf.data.stream import Stream
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.data.trie import Trie
from ptf.errors import Lost, Retryable, UserError, told
from ptf.model import bridge
from ptf.model.sampling import AS_IT_IS, Processing
from ptf.model.vocabulary import refuse_larger_tokenizer
from ptf.recipes import Companion, Online, Recipe
from ptf.rl.cluster import Cluster, LocalCluster, Pool, RoleSpec
from ptf.rl.controller import SYNC, Controller
from ptf.rl.engine import edges_of
from ptf.rl.reward_model import RewardModel, Taste, refuse_without_score
from ptf.rl.rewards import Rewards
from ptf.rl.roles import EnvironmentSpec, Learner, Sampler, Scorer
from ptf.rl.sync import SyncError
from ptf.train.companions import located, refuse_other_tokenizer
from ptf.train.parts import unadapted
from ptf.train.reading import specs
from ptf.train.rendered import in_run
from ptf.train.start import extended, own_reference, start_directory, tokenizer_directory

PARKED = "parked"  # in the run's directory: what roles keep on disk while others have the devices
CHECKED = 10_000  # prompts of each source whose length is looked at before training starts


@contextlib.contextmanager
def clustered(job: Job, run: Path, pools: Sequence[Pool], local: bool = False) -> Iterator[Cluster]:
    """Where this job's roles live: Ray actors, or (launcher local, or `local`) this process."""
    compute = job.compute
    threads = compute.threads or default_threads(1)
    left = [run / PARKED, run / SYNC]
    for place in left:  # of an attempt that was killed
        shutil.rmtree(place, ignore_errors=True)
    try:
        with _clustered(job, run, pools, threads, local) as cluster:
            yield cluster
    finally:
        for place in left:
            shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _clustered(job: Job, run: Path, pools: Sequence[Pool], threads: int, local: bool) -> Iterator[Cluster]:
    compute = job.compute
    if local or compute.launcher == "local":
        with joined(compute.device, compute.timeout_s, threads=threads) as world:
            yield LocalCluster(world, pools)
    elif compute.launcher == "ray":
        from ptf.compute.ray_session import ray_session
        from ptf.rl.verl_cluster import VerlCluster

        processes = sum(sum(pool.processes) for pool in pools)
        address = None if (compute.address or "").startswith(("http://", "https://")) else compute.address  # whose jobs train; what they made is evaluated here
        with ray_session(address=address, workdir=run, cpus=processes, timeout_s=compute.timeout_s):
            cluster = VerlCluster(device=compute.device, threads=compute.threads, timeout_s=compute.timeout_s, pools=pools, restarts=compute.restarts)
            try:
                yield cluster
            finally:
                cluster.close()
    else:
        raise UserError("compute.launcher: torchrun runs offline recipes only; use ray or local for rollouts")


def pools_of(given: Mapping[str, PoolConfig], plans: Mapping[str, RoleSpec]) -> list[Pool]:
    """Who shares devices; without any given, all do. Raises UserError unless every role of the job, and no other, sits in a pool."""
    seats = {name: frozenset(pool.roles) for name, pool in given.items()} or {"all": frozenset(plans)}
    seated = frozenset[str]().union(*seats.values())
    if unknown := seated ^ plans.keys():
        role = sorted(unknown)[0]
        fault = f"no pool has the role {role}" if role in plans else f"this job has no role {role}; it has {', '.join(plans)}"
        raise UserError(f"compute.pools: {fault}")
    disk = {name for name, pool in given.items() if pool.park == "disk"}
    wide = {name: max(plans[role].workers for role in roles) for name, roles in seats.items()}
    on = {name: tuple(sum(plans[role].workers > i for role in roles) for i in range(wide[name])) for name, roles in seats.items()}
    return [Pool(name, roles, on[name], name in disk) for name, roles in seats.items()]


def parked(spec: RoleSpec, pools: Sequence[Pool], run: Path) -> RoleSpec:
    """The role, told where its memory waits if that is on disk."""
    if not any(pool.disk and spec.name in pool.roles for pool in pools):
        return spec
    return replace(spec, kwargs={**spec.kwargs, "parked": str(run / PARKED / spec.name)})


def sampler_spec(
    job: Job, directory: Path, tokenizer: str, run: Path, *, engine: str | Plug, version: int, workers: int, length: int,
    trie: Trie | None = None, adapter: bool = False, tensor: int = 1,
) -> RoleSpec:  # fmt: skip
    """One role that generates from a Hugging Face directory, up to `length` tokens in all, in `workers` engines of `tensor` processes each. Raises
    UserError if the model has fewer positions, or cannot be cut so."""
    options: dict[str, object] = {}
    shape = bridge.shape(directory, job.model.backend)
    positions = shape.max_positions
    if length > positions:
        raise UserError(f"prompt and answer may take {length} tokens together, but {directory} has {positions} positions; lower data.seq_len or max_new_tokens")
    if shape.heads % tensor:
        raise UserError(f"rollout.tensor: {tensor} engines' parts cannot share {shape.heads} attention heads equally")
    env: dict[str, str] = {}
    if engine == "vllm":
        from ptf.rl.vllm_engine import engine_env

        options = {"tensor": tensor}
        if job.rollout:
            options |= {"kv_cache_gib": job.rollout.kv_cache_gib, "gpu_share": job.rollout.gpu_share}
        env = engine_env(run / "vllm")
    if engine == "native":
        options = {"spec": job.model}
    if job.rollout and (what := job.rollout.environment):
        knobs = job.rollout
        options["environment"] = EnvironmentSpec(what, knobs.max_turns, knobs.processes, knobs.reward_timeout_s, knobs.retries)
    if job.rollout:
        options |= {"top_p": job.rollout.top_p, "trie": trie}
    if trie is not None and engine == "vllm":
        options["restricted"] = True
    if adapter and job.model.lora and engine == "vllm":
        options["lora_rank"] = job.model.lora.rank
    if adapter and engine == "native":
        options["adapted"] = True
    kwargs = {
        "engine": engine, "directory": str(directory), "tokenizer": tokenizer, "version": version, "seed": job.seed, "precision": job.train.precision,
        "max_length": length, "vocabulary": shape.vocab, "timeout_s": job.compute.timeout_s, **options,
    }  # fmt: skip
    return RoleSpec("rollout", Sampler, kwargs, workers * tensor, env, tensor=tensor)


def trie_of(knobs: RolloutConfig | None, tokenizer: Tokenizer) -> Trie | None:
    """The answers that there may be, if not any."""
    if knobs is None or knobs.allowed is None:
        return None
    text = storage.read_text(knobs.allowed.path).replace("\r\n", "\n").removesuffix("\n")
    lines = text.split("\n") if text else []
    try:
        return Trie.of((tokenizer.encode(line) for line in lines), tokenizer.stop_ids, knobs.allowed.repeat, knobs.allowed.distinct)
    except UserError as error:
        raise UserError(f"rollout.allowed.path: {knobs.allowed.path}: {error}") from error


def refuse_cut_answers(trie: Trie, job: Job, longest_prompt: int) -> None:
    """Raises UserError if an allowed answer cannot be said to its end, in training or in evaluation."""
    assert job.rollout is not None
    rooms = {"rollout.max_new_tokens": job.rollout.max_new_tokens}
    if job.evaluate.sources:
        rooms["evaluate.max_new_tokens"] = job.evaluate.max_new_tokens
        if job.train.validate_every:
            rooms["data.seq_len less the longest held-out prompt"] = job.data.seq_len - longest_prompt
    for key, room in rooms.items():
        if trie.longest > room:
            raise UserError(f"rollout.allowed: its longest answer has {trie.longest} tokens with the one that ends it; {key} is {room}")


def drawing(recipe: Recipe, knobs: RolloutConfig, trie: Trie | None) -> tuple[Recipe, Processing]:
    """The recipe, told what answers are drawn from, and that. Raises UserError if one of the user's own cannot be told."""
    how = Processing(knobs.temperature, knobs.top_p, None if trie is None else edges_of(trie))
    if how.top_p < 1 and cast("Online", recipe).needs_old:
        raise UserError("rollout.top_p: the recipe needs the policy's log-probs of before, and a nucleus is taken of one policy's distribution; give 1")
    if is_dataclass(recipe) and any(field.name == "how" and field.init for field in fields(recipe)):
        return replace(cast("Any", recipe), how=how), how
    if how != AS_IT_IS:
        raise UserError(
            "rollout.temperature, rollout.top_p and rollout.allowed: the recipe is no dataclass with a field `how` (ptf.model.sampling.Processing), so its "
            "loss does not know what answers are drawn from; give it one, or leave them at 1, 1 and null"
        )
    return recipe, how


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


def start_of(one: Companion, role: str, tokenizer: str, model: Path, verify_up_to: float) -> dict[str, Any]:
    """What a model of its own is loaded from. Raises UserError if it is not there, or reads other tokens than the policy does."""
    place = located(one, role, verify_up_to)
    refuse_other_tokenizer(place, tokenizer, role, one, model)
    return {"directory": str(place), "spec": ModelConfig(path=str(place))}


def fit_online(job: Job, run: Path, lease: Lease) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one; leaves `run/model`, a Hugging Face directory. On Ray, what fails in the
    middle goes on from the newest checkpoint, `compute.restarts` times without a newer one."""
    saves = Checkpoints.of(job, run)
    at, again, said = -1, 0, ""
    while True:
        try:
            return attempt(job, run, lease)
        except (UserError, SyncError, TimeoutError):
            raise
        except Exception as error:
            found = saves.latest()
            step = found[0] if found else 0
            again, repeated = (again + 1, str(error) == said) if step == at else (1, False)
            if job.compute.launcher != "ray" or again > job.compute.restarts or (repeated and not isinstance(error, Lost)):
                raise
            if Requests(run).made:
                raise Retryable(f"asked to stop, and then: {error}") from error
            at, said = step, str(error)
            print(f"{redacted(told(error))}\nstarted again from step {step} ({again} of {job.compute.restarts}, compute.restarts)", flush=True)


def attempt(job: Job, run: Path, lease: Lease) -> None:
    """fit_online, once."""
    knobs = job.rollout
    if knobs is None:
        raise UserError("an online recipe needs the section rollout")
    recipe = recipes.build(job)
    evaluation = job.evaluate.reward
    directory = bridge.locate(job.model.path, job.model.revision, verify_up_to=job.verify_bytes)
    model, directory = extended(job.model, directory, run, job.seed)
    tokenizer_path = tokenizer_directory(job, model, directory, run)
    tokenizer = Tokenizer.load(tokenizer_path)
    refuse_larger_tokenizer(directory, tokenizer_path, tokenizer.vocab_size)
    room = job.data.seq_len - knobs.max_new_tokens
    drop = job.data.too_long == "drop"
    sources = specs(job.data.sources)
    drawn = prompts_stream(sources, tokenizer=tokenizer, seed=job.seed, shuffle=job.data.shuffle, temperature=job.data.mix.temperature)
    assert job.train.steps is not None, "online jobs have no train.epochs"
    mixing = "shares of their weights" if drawn.mixture.weighted else "every prompt once before any comes again"
    print(f"prompts: {mixing}; {of_prompts(drawn, knobs.prompts, job.train.steps).said()}", flush=True)
    prompts = Fitting(drawn, room, drop)
    if not drop:  # better now than in the middle of the night
        for name, spec in sources.items():
            for prompt in itertools.islice(prompts_once(spec, name, tokenizer), CHECKED):
                refuse_too_long(prompt, room)
    if job.evaluate.ranking is not None:  # rewards look items up in it, too
        Catalogue.load(job.evaluate.ranking.catalogue).refuse_other(tokenizer, "the model's")
    trie = trie_of(knobs, tokenizer)
    recipe, how = drawing(recipe, knobs, trie)
    held_out = held_out_prompts(job.evaluate.sources, tokenizer, job.evaluate.limit) if job.train.validate_every else {}
    if trie is not None:
        refuse_cut_answers(trie, job, max((len(p.tokens) for prompts in held_out.values() for p in prompts), default=0))
    start = start_directory(model, directory, run, tokenizer_path, job.seed)
    workers = job.compute.workers
    mesh: dict[str, Any] = {"replicate": job.compute.mesh.replicate, "tensor": job.compute.mesh.tensor}
    common = {
        "directory": str(start),
        "spec": model.model_copy(update={"init": "pretrained"}),
        "seed": job.seed,
        "width": job.data.seq_len,
        "how": how,
    }
    frozen = {"spec": unadapted(common["spec"]), "precision": job.train.precision, "micro_rows": job.train.micro_rows}
    if job.train.deterministic:
        frozen["width"] = 0
    own = {role: start_of(one, role, tokenizer_path, start, job.verify_bytes) for role, one in recipe.companions.items() if one.path is not None}
    print("\n".join(first_lines(sources)), flush=True)
    made_with = provenance.made_with(CPU, fingerprints(sources), tokenizer.fingerprint())
    if trie is not None:
        made_with["allowed"] = trie.fingerprint()
    plans = {"policy": RoleSpec("policy", Learner, {**common, "tokenizer": tokenizer_path, "train": job.train, "recipe": recipe}, workers, **mesh)}
    for role in recipe.companions:
        if role in own or not own_reference(model):
            plans[role] = RoleSpec(role, Scorer, {**common, **frozen, **own.get(role, {})}, workers, **mesh)
    if (trained_by := cast("Online", recipe).critic) is not None:
        lr = job.algo.critic_lr if isinstance(job.algo, PPOAlgo) else None
        train = job.train.model_copy(update={"lr": lr or job.train.lr})
        plans["critic"] = RoleSpec("critic", Learner, {**common, "tokenizer": tokenizer_path, "train": train, "recipe": trained_by}, workers, **mesh)
    if liked := knobs.reward_model:
        place = located(Companion(liked.path, liked.revision), "rollout.reward_model.path", job.verify_bytes)
        refuse_without_score(place)
        longest = min(bridge.shape(place).max_positions, 2 * job.data.seq_len)  # its tokenizer and template may take more tokens than the policy's
        width = 0 if job.train.deterministic else longest
        scoring = {"directory": str(place), "spec": ModelConfig(path=str(place)), "seed": job.seed, "precision": job.train.precision}
        plans["reward"] = RoleSpec("reward", RewardModel, {**scoring, "width": width, "micro_rows": job.train.micro_rows}, workers, **mesh)
    plans["rollout"] = sampler_spec(
        job, start, tokenizer_path, run, engine=knobs.engine, version=-1, workers=knobs.workers, length=job.data.seq_len, trie=trie,
        adapter=knobs.lora == "adapter", tensor=knobs.tensor,
    )  # fmt: skip
    pools = pools_of(job.compute.pools, plans)
    with clustered(job, run, pools) as cluster:
        groups = {role: cluster.start(parked(spec, pools, run)) for role, spec in plans.items()}
        policy, rollout = groups["policy"], groups["rollout"]
        scorers = {role: groups.get(role, policy) for role in recipe.companions}
        critic = groups.get("critic")
        taste = Taste(groups["reward"], in_run(job, Tokenizer.load(str(place)), run), longest, liked.weight) if liked else None
        engine = knobs.engine.use if isinstance(knobs.engine, Plug) else knobs.engine
        print(f"rollout: engine={engine} workers={knobs.workers} {', '.join(rollout.where())}", flush=True)
        judge = rewards_of(job, evaluation)
        controller = Controller(
            job, cast("Online", recipe), prompts, held_out, cluster, policy=policy, rollout=rollout, scorers=scorers, critic=critic,
            rewards=rewards_of(job, knobs.reward), taste=taste, judge=judge, made_with=made_with, tokenizer=tokenizer, run=run, lease=lease,
        )  # fmt: skip
        try:
            controller.run()
            with cluster.phase(policy, "export"):
                lease.check()
                provenance.write(run, made_with)
                policy.call("export", str(run / "model"))
        finally:
            controller.close()
