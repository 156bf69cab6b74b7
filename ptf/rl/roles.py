"""Roles that have a model: `Learner` (policy, critic) and `LogprobModel` (reference, teacher).

The policy role *is* the SFT trainer, called by the controller. The role that generates is
`ptf.rl.sampler.Sampler`, and the role of a reward model is `ptf.rl.rewards.model.RewardModel`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from ptf.compute import checkpoint
from ptf.compute.offload import OffloadedTensors, own_file
from ptf.compute.saver import BackgroundWriter
from ptf.compute.world import World, alone
from ptf.config.logprob_limits import LogprobLimits
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.document import Document, PackUnit
from ptf.errors import UserError
from ptf.model.components import abbreviated
from ptf.model.lora import adapters_off
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing
from ptf.recipes.documents import last_values
from ptf.recipes.protocol import Recipe
from ptf.rl.cluster import Role, broadcast, split_over_workers
from ptf.rl.forward_passes import packer_of, per_document, per_token, sample_logprobs
from ptf.rl.weights import stored
from ptf.rl.weights.streamed import Sender, Streamed, Transfer
from ptf.rl.weights.verification import LARGEST, MEAN, SAMPLED_TOKENS, SHARE, Buckets, LogprobDifference, Manifest
from ptf.train.adapter import export_adapter
from ptf.train.batch_sharding import deal, shard_sequences_singly
from ptf.train.deterministic import DeterministicTrainer
from ptf.train.export import export
from ptf.train.load_comparison import compare_with_transformers
from ptf.train.trainer import Trainer, forget_forwards, is_largest, load_model
from ptf.train.warm_up import warm_up


def device_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of a model that stay on its device between two calls: parameters, gradients and buffers."""
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward without a backward, its parameters are the gathered copies
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


def logprob_check(units: Sequence[PackUnit], step: int, limits: LogprobLimits) -> Callable[[Mapping[str, float]], None]:
    """Return a function that checks the metrics of an optimizer step against `limits`."""
    tokens = sum(int(np.count_nonzero(sample.loss_weights)) for unit in units for sample in unit)

    def check(means: Mapping[str, float]) -> None:
        difference = LogprobDifference(means[MEAN], means[SHARE], means[LARGEST], tokens)
        difference.raise_if_beyond(limits, f"step {step + 1}: {SAMPLED_TOKENS}")

    return check


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What a role's model is loaded from, and how it computes."""

    directory: Path
    section: ModelConfig  # loads `directory`
    train: TrainConfig
    seed: int
    seq_len: int
    processing: LogitsProcessing = NO_LOGITS_PROCESSING
    offload_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(ModelSettings):
    """The same of a model that is trained."""

    recipe: Recipe
    tokenizer: str


class ModelRole(Role):
    """What roles that have a model share; one that is not a Learner's is frozen."""

    uses_process_group: ClassVar[bool] = True
    is_trained: ClassVar[bool] = False
    head: Literal["lm", "scalar"] = "lm"

    def __init__(self, world: World, settings: ModelSettings) -> None:
        self.world, self.settings, train = world, settings, settings.train
        self.offloaded = OffloadedTensors(own_file(settings.offload_path, world.rank))
        self.model = load_model(
            settings.directory,
            alone(world) if self.is_trained and train.deterministic else world,
            settings.section,
            seed=settings.seed,
            precision=train.precision,
            head=self.head,
            recomputed=train.activation_checkpointing if self.is_trained else "none",
            compiled=train.compile,
            fused=train.fused,
            frozen=not self.is_trained,
        )
        # the packed sequences of passes without training
        self.scored = {
            "seq_len": 0 if train.deterministic else settings.seq_len,
            "micro_batch_sequences": train.micro_batch_sequences,
        }
        warm_up(
            self.model,
            world,
            settings.seq_len if self.is_trained else self.scored["seq_len"],
            trained={train.micro_batch_sequences} if self.is_trained else (),
            scored={train.micro_batch_sequences},
            share_prefixes=self.model.supports_shared_prefixes,
        )

    @split_over_workers
    def logprobs(self, samples: list[Document], processing: LogitsProcessing | None = None) -> list[np.ndarray]:
        """Return the log-probs of each sample's trained tokens under the sampling distribution, or another one: [n]
        each, 0 for tokens that are not trained."""
        processing = processing or self.settings.processing
        values = sample_logprobs(self.model, samples, self.world, processing=processing, **self.scored)
        if not self.is_trained:
            forget_forwards(self.model)
        return values

    @broadcast
    @override
    def offload(self) -> None:
        self.offloaded.offload(device_tensors(self.model))

    @broadcast
    @override
    def onload(self) -> None:
        self.offloaded.restore()


class LogprobModel(ModelRole):
    """A frozen model that computes log-probs: the reference, or a teacher."""


class Learner(ModelRole):
    """A role whose model is trained: the policy, or its critic."""

    is_trained: ClassVar[bool] = True

    def __init__(self, world: World, settings: LearnerSettings) -> None:
        self.recipe, self.tokenizer, train = settings.recipe, settings.tokenizer, settings.train
        self.head = settings.recipe.head
        super().__init__(world, settings)
        if world.leads:
            print(
                f"{self.head} head, {train.precision}: attention={self.model.attention_name(world.device)}, "
                f"{self.model.kernels.compilation}",
                flush=True,
            )
        trainer_class = DeterministicTrainer if train.deterministic else Trainer
        self.trainer = trainer_class(self.model, world, train)
        self.sender: Sender | None = None
        self.writer: BackgroundWriter | None = None

    @broadcast
    def kernels(self) -> dict[str, str]:
        """Return the packages whose kernels the model uses (`train.fused`), and their versions."""
        return dict(self.model.kernels.packages)

    @broadcast
    def update(
        self, minibatches: list[list[PackUnit]], step: int, limits: LogprobLimits | None = None
    ) -> dict[str, float]:
        """Make one optimizer step for each minibatch, whose packed sequences are divided among the ranks.

        Return the means of the metrics over all units, and the largest values of metrics that are largest values
        (`ptf.train.trainer.is_largest`). With `limits`, the engine's log-probs are compared with the
        trainer's; if they differ by more, SyncError is raised before the optimizer step.
        """
        seq_len, train = self.settings.seq_len, self.settings.train
        self.world.seed(self.settings.seed, step)
        results = []
        for units in minibatches:
            sequences = packer_of(self.model)(units, seq_len)
            if train.deterministic:
                micro, numbers = shard_sequences_singly(sequences, self.world)
            else:
                micro, numbers = deal(sequences, self.world, train.micro_batch_sequences, seq_len), []
            check = None if limits is None else logprob_check(units, step, limits)
            results.append(self.trainer.step(micro, self.recipe, step, numbers, check))
        denominators = [r["loss_denominator"] for r in results]

        def combined(name: str) -> float:
            values = [r[name] for r in results]
            if is_largest(name):
                return max(values)
            return float(np.average(values, weights=None if name == "loss_denominator" else denominators))

        return {name: combined(name) for name in results[0]}

    @split_over_workers
    def values(self, samples: list[Document]) -> list[np.ndarray]:
        """Return the critic's value before each trained token: [n] per sample, 0 for tokens that are not trained."""

        def values(batch, x, head):
            return head.values(x) * (batch.loss_weights != 0)

        return per_token(self.model, samples, self.world, values, **self.scored)

    @split_over_workers
    def last_values(self, samples: list[Document]) -> list[float]:
        """Return the critic's value after the last token of each sample."""
        return per_document(self.model, samples, self.world, last_values, **self.scored)

    @split_over_workers
    def base_logprobs(self, samples: list[Document]) -> list[np.ndarray]:
        """Return the same as `logprobs`, for the model without its adapters.

        This is the model that training started from, so no second model is needed.
        """
        with adapters_off(self.model):
            return self.logprobs(samples)

    @split_over_workers
    def prompt_logprobs(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probs of tokens 1…n-1 of each context at temperature 1: the trainer's side of the canary."""
        samples = [Document(t.astype(np.int32), np.ones(len(t), np.float32)) for t in tokens]
        return [values[1:] for values in self.logprobs(samples, NO_LOGITS_PROCESSING)]

    @broadcast
    def compare_with_transformers(self, tokens: np.ndarray) -> None:
        """See ptf.train.load_comparison."""
        settings = self.settings
        compare_with_transformers(
            self.model, settings.directory, settings.section, tokens.tolist(), self.world, settings.train.precision
        )

    @broadcast
    def collect_weights(
        self, version: int, directory: Path | None = None, adapter: bool = False
    ) -> tuple[Buckets, Manifest] | None:
        """Return all tensors by Hugging Face name, in buckets, with their manifest; None on ranks other than 0.

        With `adapter`, the tensors are those of the adapter, by PEFT's names. The buckets are in memory, or in files
        under `directory`. Raises UserError if PEFT's format cannot store all trained parameters.
        """
        form = self.model.peft() if adapter else None
        if form and (obstacles := form.obstacles()):
            raise UserError(f"rollout.lora_sync: an adapter cannot hold {abbreviated(obstacles)}; use merged")
        tensors = form.tensors() if form else self._sent_tensors()
        if not self.world.leads:
            deque(tensors, maxlen=0)  # take part in the gathering
            return None
        buckets, manifest = (
            stored.write_buckets(tensors, directory, version) if directory else stored.collect(tensors, version)
        )
        return buckets, replace(manifest, adapter=form and form.config(str(self.settings.directory)))

    @broadcast
    def open_transfer(
        self, transport: type[Streamed], version: int, engines: int, timeout_s: float
    ) -> tuple[Transfer, Manifest]:
        """Return the transfer that the engines read while `send` runs, and its manifest."""
        if self.sender is None and (transport.from_every_rank or self.world.leads):
            self.sender = transport.sender(self.world.device, engines, timeout_s)
        offers = tuple(offer for offer in self.world.all_gather_object(self.sender and self.sender.offer) if offer)
        names = self.model.hf_names()
        transfer = Transfer(transport, version, frozenset(names), offers, engines, timeout_s)
        return transfer, Manifest(version, dict.fromkeys(sorted(names), ""))

    @broadcast
    def send(self, version: int) -> None:
        """Send all tensors by Hugging Face name to the engines that read the transfer that `open_transfer` returned."""
        tensors = self._sent_tensors()
        if self.sender:
            self.sender.send(version, tensors)
        deque(tensors, maxlen=0)  # without a sender, take part in the gathering

    def _sent_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by Hugging Face name, rounded to the dtype that the engines compute in."""
        exact = self.model.exact_names()
        for name, tensor in self.model.hf_tensors():
            rounded = self.settings.train.precision == "bf16" and tensor.dtype == torch.float32 and name not in exact
            yield name, tensor.to(torch.bfloat16) if rounded else tensor

    @broadcast
    def save(self, directory: str, timeout_s: float) -> int:
        """Copy the state to the host, and begin to write a checkpoint; return the bytes of rank 0's tensors."""
        self.writer = self.writer or BackgroundWriter(self.world, timeout_s)
        with self.trainer.whole_optimizer():
            self.writer.begin(directory, self.model, self.trainer.optimizer, {})
        return self.writer.num_bytes

    @broadcast
    def saved(self, wait_s: float) -> checkpoint.Entries | None:
        """Return the manifest entries of the files of all ranks; None if they are not written within `wait_s` seconds.
        Raises what writing them raised."""
        assert self.writer is not None
        if not self.writer.wait(wait_s):
            return None
        if self.writer.error is not None:
            raise self.writer.error
        return self.writer.entries

    @broadcast
    def load(self, directory: str) -> None:
        """Load the weights and the optimizer's state from a checkpoint."""
        with self.trainer.whole_optimizer():
            checkpoint.load_tensors(directory, self.model, self.trainer.optimizer, self.world)

    @broadcast
    def export(self, directory: str) -> None:
        """Write a Hugging Face directory and a probe that a loaded model must reproduce; with LoRA, the adapter too."""
        source, section = self.settings.directory, self.settings.section
        export(self.model, source, Path(directory), self.world, self.tokenizer)
        if section.lora:
            export_adapter(self.model, source, Path(directory), self.world, section, self.settings.train.precision)

    @broadcast
    @override
    def offload(self) -> None:
        """Move weights, gradients and the optimizer's state away."""
        tensors = list(device_tensors(self.model))
        for state in self.trainer.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        self.offloaded.offload(tensors)
