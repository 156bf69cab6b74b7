"""Three classes cover the roles of on-policy training: `Learner` (policy, critic), `Scorer` (reference), `Sampler` (rollout).

The one idea: the policy role *is* the SFT trainer, called from elsewhere.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ptf.compute import checkpoint
from ptf.compute.meter import memory_gib
from ptf.compute.parking import Parking, give_back, own_file
from ptf.compute.world import World, alone
from ptf.config import Plug, plug
from ptf.config.schema import ModelConfig, TrainConfig
from ptf.data.sample import Atom, Sample
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Prompt, Trajectory
from ptf.data.trie import Trie
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.lora import adapters_off
from ptf.model.peft_format import PeftFormat
from ptf.model.sampling import AS_IT_IS, Processing
from ptf.recipes.protocol import Recipe
from ptf.rl.cluster import everywhere, lasting, once, sharded
from ptf.rl.engine import RolloutEngine, Sampling
from ptf.rl.env import Environments
from ptf.rl.looking import packing, per_token, sample_logprobs
from ptf.rl.play import Episode, Limits, played
from ptf.rl.sync import Buckets, Manifest, Receipt, SyncError, bucketed, manifest_of, written
from ptf.rl.transfer import Sender, Transfer
from ptf.train.adapter import export_adapter
from ptf.train.canonical import trainer_of
from ptf.train.deal import deal, dealt_alone
from ptf.train.export import export
from ptf.train.parts import parts_of, some
from ptf.train.trainer import forget_forwards, load_model


def refuse_apart(step: int, worst: float, bound: float) -> None:
    """Engine and trainer must agree on what the policy is. Raises SyncError above the bound."""
    if not worst <= bound:
        raise SyncError(
            f"step {step}: the engine's and the trainer's log-probs of a sampled token differ by {worst:.3g} (bound {bound:g}, "
            "rollout.max_logprob_diff): they do not hold the same policy"
        )


def held(model: nn.Module) -> Iterator[Tensor]:
    """What a model keeps on its device between two calls."""
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward without a backward it shows its gathered copies
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


class Frozen:
    """A model that is only looked at."""

    distributed: ClassVar[bool] = True
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    def __init__(
        self, world: World, *, directory: str, spec: ModelConfig, seed: int, precision: str, width: int, micro_rows: int, parked: str | None = None
    ) -> None:  # fmt: skip
        self.world, self.width, self.micro_rows = world, width, micro_rows
        self.parking = Parking(own_file(parked, world.rank))
        self.model, self.family = load_model(Path(directory), world, spec, seed=seed, precision=precision, head=self.head)
        self.model.requires_grad_(False)

    @everywhere
    def park(self) -> None:
        self.parking.park(held(self.model))

    @everywhere
    def wake(self) -> None:
        self.parking.wake()

    @everywhere
    def memory_gib(self) -> float:
        return memory_gib(self.world.device)


class Scorer(Frozen):
    """It gives log-probs."""

    def __init__(self, world: World, *, how: Processing, **kwargs: Any) -> None:
        super().__init__(world, **kwargs)
        self.how = how

    @sharded
    def logprobs(self, samples: list[Sample]) -> list[np.ndarray]:
        """Of the trained tokens of each sample, from what they were drawn from: [n] each, 0 elsewhere."""
        found = sample_logprobs(self.model, samples, self.world, width=self.width, micro_rows=self.micro_rows, how=self.how)
        forget_forwards(self.model)
        return found


class Learner:
    """A model that is trained: the policy, or its critic."""

    distributed: ClassVar[bool] = True

    def __init__(
        self, world: World, *, directory: str, tokenizer: str, spec: ModelConfig, seed: int, train: TrainConfig, recipe: Recipe, width: int,
        how: Processing, parked: str | None = None,
    ) -> None:  # fmt: skip
        self.parking = Parking(own_file(parked, world.rank))
        self.world, self.source, self.recipe, self.width, self.how, self.seed = world, Path(directory), recipe, width, how, seed
        self.tokenizer, self.spec, self.precision = tokenizer, spec, train.precision
        self.micro_rows, self.deterministic = train.micro_rows, train.deterministic
        self.scored = 0 if train.deterministic else width  # the width of rows that are only looked at
        within = alone(world) if train.deterministic else world  # who holds the model together
        self.model, self.family = load_model(
            self.source, within, spec, seed=seed, precision=train.precision, head=recipe.head, recomputed=train.checkpointing, compiled=train.compile
        )
        self.trainer = trainer_of(train, self.model, world)
        self.sender: Sender | None = None

    @everywhere
    def update(self, minibatches: list[list[Atom]], step: int, bound: float | None = None) -> dict[str, float]:
        """One optimizer step for each minibatch, whose rows are dealt to the ranks; metrics are means over all units. With a `bound` the recipe
        compares the engine's log-probs with its own, and nothing is trained if they differ by more: SyncError."""
        check = None if bound is None else lambda means: refuse_apart(step, means["max_logprob_diff"], bound)
        self.world.seed(self.seed, step)
        results = []
        for atoms in minibatches:
            rows = packing(self.model)(atoms, self.width)
            self.trainer.refuse_large(len(rows))
            if self.deterministic:
                micro, numbers = dealt_alone(rows, self.world)
            else:
                micro, numbers = deal(rows, self.world, self.micro_rows, self.width), []
            results.append(self.trainer.step(micro, self.recipe, step, numbers, check))
        units = [r["units"] for r in results]
        return {name: float(np.average([r[name] for r in results], weights=None if name == "units" else units)) for name in results[0]}

    @sharded
    def logprobs(self, samples: list[Sample]) -> list[np.ndarray]:
        """As Scorer.logprobs, of the weights as they are now."""
        return sample_logprobs(self.model, samples, self.world, width=self.scored, micro_rows=self.micro_rows, how=self.how)

    @sharded
    def values(self, samples: list[Sample]) -> list[np.ndarray]:
        """What the critic expects before each trained token: [n] each, 0 elsewhere."""
        expected = lambda x, head, batch: head.values(x) * (batch.weights != 0)  # noqa: E731
        return per_token(self.model, samples, self.world, expected, width=self.scored, micro_rows=self.micro_rows)

    @sharded
    def base_logprobs(self, samples: list[Sample]) -> list[np.ndarray]:
        """As Scorer.logprobs, of the model without its adapters: what it was when training started, with no second model."""
        with adapters_off(self.model):
            return self.logprobs(samples)

    @sharded
    def score(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs of tokens 1…n-1 of each sequence at temperature 1: the trainer's side of the canary."""
        samples = [Sample(t.astype(np.int32), np.ones(len(t), np.float32)) for t in tokens]
        values = sample_logprobs(self.model, samples, self.world, width=self.scored, micro_rows=self.micro_rows, how=AS_IT_IS)
        return [v[1:] for v in values]

    @everywhere
    def weights(self, version: int, directory: str | None = None, adapter: bool = False) -> tuple[Buckets, Manifest] | None:
        """All tensors by Hugging Face name, or those of its `adapter` by PEFT's, in buckets, with their manifest; on rank 0. The buckets are in memory,
        or in files under `directory`. Raises UserError if PEFT's format cannot hold what trains."""
        form = PeftFormat(self.model, self.family) if adapter else None
        if form and (obstacles := form.obstacles()):
            raise UserError(f"rollout.lora: an adapter cannot hold {some(obstacles)}; give merged")
        tensors = form.tensors() if form else bridge.hf_tensors(self.model, self.family)
        if not self.world.leads:
            for _ in tensors:  # take part in the gathering
                pass
            return None
        copied = ((name, t.to("cpu", copy=True)) for name, t in tensors)
        if directory is not None:
            buckets, manifest = written(copied, Path(directory), version)
        else:
            buckets = list(bucketed(copied))
            manifest = manifest_of(buckets, version)
        return buckets, replace(manifest, adapter=form and form.config(str(self.source)))

    @everywhere
    def lend(self, how: Literal["ipc", "nccl"], version: int, engines: int, timeout_s: float) -> tuple[Transfer, Manifest]:
        """What engines can look at while `send` runs."""
        if self.sender is None and (how == "ipc" or self.world.leads):
            self.sender = Sender(how, self.world.device, engines, timeout_s)
        offers = tuple(offer for offer in self.world.gather(self.sender and self.sender.offer) if offer)
        names = bridge.hf_names(self.model, self.family)
        return Transfer(how, version, frozenset(names), offers, engines, timeout_s), Manifest(version, dict.fromkeys(sorted(names), ""))

    @everywhere
    def send(self, version: int) -> None:
        """All tensors by Hugging Face name, to the engines that look at what was lent."""
        tensors = bridge.hf_tensors(self.model, self.family)
        if self.sender:
            self.sender.send(version, tensors)
        else:
            for _ in tensors:  # take part in the gathering
                pass

    @everywhere
    def save(self, directory: str) -> checkpoint.Entries:
        """What was written, by all ranks."""
        return checkpoint.write(directory, checkpoint.tensors_of(self.model, self.trainer.optimizer), {}, self.world)

    @everywhere
    def load(self, directory: str) -> None:
        checkpoint.load_tensors(directory, self.model, self.trainer.optimizer, self.world)

    @everywhere
    def export(self, directory: str) -> None:
        """Write a Hugging Face directory, and beside it the probe that it must reproduce."""
        export(self.model, self.family, self.source, Path(directory), self.world, self.tokenizer)
        if self.spec.lora:
            export_adapter(self.model, self.family, self.source, Path(directory), self.world, self.spec, self.precision)

    @everywhere
    def park(self) -> None:
        """Weights, gradients and optimizer leave the device."""
        self.parking.park([*held(self.model), *(v for state in self.trainer.optimizer.state.values() for v in state.values() if isinstance(v, Tensor))])

    @everywhere
    def wake(self) -> None:
        self.parking.wake()

    @everywhere
    def memory_gib(self) -> float:
        return memory_gib(self.world.device)


@dataclass(frozen=True)
class EnvironmentSpec:
    """How episodes are played: plain values that travel to the workers."""

    what: Plug
    max_turns: int
    processes: int
    timeout_s: float
    retries: int

    def made(self) -> Environments:
        return Environments(self.what, processes=self.processes, timeout_s=self.timeout_s, retries=self.retries)


class Sampler:
    """An engine that generates for the policy."""

    distributed: ClassVar[bool] = False

    def __init__(
        self, world: World, *, engine: str | Plug, directory: str, tokenizer: str, version: int, seed: int, precision: str, max_length: int,
        timeout_s: float, vocabulary: int | None = None, environment: EnvironmentSpec | None = None, top_p: float = 1.0, trie: Trie | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.world, self.seed, self.timeout_s, self.max_length, self.vocabulary = world, seed, timeout_s, max_length, vocabulary
        self.top_p, self.trie = top_p, trie
        self.environments = environment and environment.made()
        self.max_turns = environment.max_turns if environment else 1
        self.tokenizer = Tokenizer.load(tokenizer)
        self.engine = make_engine(engine, directory, world, version=version, seed=seed, precision=precision, max_length=max_length, **options)

    @sharded(cost=lambda prompt: len(prompt.tokens))
    def rollout(self, prompts: list[Prompt], version: int, key: str, n: int, max_new_tokens: int, temperature: float) -> Iterator[tuple[int, Group]]:
        """n answers to each prompt, with its number, as soon as all of them are there. `key` names the occasion (a step, an evaluation) and with the
        prompt's index and the sample's number seeds each answer. Raises SyncError, before anything is generated, unless the engine holds exactly
        `version`."""
        if self.engine.version != version:
            raise SyncError(f"the rollout engine holds weights {self.engine.version}, the policy is at {version}: a sync was lost; nothing was generated")
        limits = Limits(Sampling(max_new_tokens, temperature, self.tokenizer.stop_ids, self.top_p, self.trie), self.max_length, self.max_turns, self.vocabulary)
        made = lambda p, i: Episode(p, limits, self.tokenizer, partial(seed_of, self.seed, key, p.index, i), self.environments)  # noqa: E731
        found: list[dict[int, Trajectory]] = [{} for _ in prompts]
        for number, trajectory in self._play([made(p, i) for p in prompts for i in range(n)]):
            which, i = divmod(number, n)
            found[which][i] = trajectory
            if len(found[which]) == n:
                yield which, tuple(found[which][i] for i in range(n))

    def _play(self, episodes: list[Episode]) -> Iterator[tuple[int, Trajectory]]:
        """Each with its number, as it ends. Raises TimeoutError after `timeout_s` seconds."""
        until, playing = time.monotonic() + self.timeout_s, played(self.engine, episodes)

        async def following() -> tuple[int, Trajectory] | None:
            return await asyncio.wait_for(anext(playing, None), max(0.0, until - time.monotonic()))

        with asyncio.Runner() as runner:
            run = runner.get_loop().run_until_complete  # Runner.run asks twice for Python's handler of SIGINT, which writes out, in words, what was returned
            try:
                while (ended := run(following())) is not None:
                    yield ended
            except TimeoutError:
                left, processes = sum(not e.over for e in episodes), f" in {len(self.environments.homes)} processes" if self.environments else ""
                raise TimeoutError(
                    f"{left} of {len(episodes)} episodes{processes} were not over after {self.timeout_s:g} s (compute.timeout_s): "
                    f"{'rollout.processes may be too few, or ' if self.environments else ''}there are too many or too long answers for one step"
                ) from None
        # leaving the Runner cancels what is under way, and closes `playing`

    @everywhere
    def asked_again(self) -> int:
        """How often an environment had to be asked once more, in this worker, since this was asked last."""
        return self.environments.asked_again() if self.environments else 0

    @lasting
    def load(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        return self.engine.load_weights(buckets, manifest)

    @once
    def receive(self, transfer: Transfer, manifest: Manifest) -> Receipt:
        """As `load`, of what the policy sends meanwhile."""
        with transfer.telling():
            return self.engine.load_weights(transfer, manifest)

    @lasting
    def canary(self, tokens: list[np.ndarray], expected: list[np.ndarray], bound: float) -> float:
        """Largest difference from the trainer's log-probs of fixed sequences. Raises SyncError above `bound`."""
        worst = max(float(np.abs(a - b).max()) for a, b in zip(self.engine.score(tokens), expected, strict=True))
        if not worst <= bound:
            raise SyncError(
                f"after sync {self.engine.version} the engine's log-probs of the canary differ from the trainer's by {worst:.3g} (bound {bound:g}): "
                "it does not compute with the weights that were sent"
            )
        return worst

    @everywhere
    def park(self) -> None:
        self.engine.sleep()
        give_back()

    @everywhere
    def wake(self) -> None:
        self.engine.wake()

    @everywhere
    def memory_gib(self) -> float:
        return memory_gib(self.world.device)


def seed_of(seed: int, key: str, prompt: int, sample: int, turn: int = 0) -> int:
    """A number for one answer, the same wherever it is generated; of turn -1, for its environment."""
    turns = [turn + 2] if turn else []
    return int(np.random.SeedSequence([seed, *key.encode(), prompt, sample, *turns]).generate_state(1, np.uint32)[0])


def make_engine(kind: str | Plug, directory: str, world: World, *, version: int, seed: int, precision: str, max_length: int, **options: Any) -> RolloutEngine:
    dtype = "bfloat16" if precision == "bf16" else "float32"
    if isinstance(kind, Plug):
        return plug.bind(kind)(directory, device=str(world.device), dtype=dtype, version=version, seed=seed, max_length=max_length)
    if kind == "native":
        from ptf.rl.native_engine import NativeEngine

        parts = parts_of(options["spec"], adapted=bool(options.get("adapted"))) if "spec" in options else None
        parked = own_file(options.get("parked"), world.rank)
        return NativeEngine(directory, device=world.device, dtype=getattr(torch, dtype), version=version, parts=parts, seed=seed, parked=parked)
    from ptf.rl.vllm_engine import VLLMEngine

    return VLLMEngine(directory, seed=seed, dtype=dtype, max_model_len=max_length, version=version, **options)
