"""The parts of training in which algorithms differ, and nothing else: what a recipe is, and what it may leave out.

A loss is a *sum*; the step divides it once, by the denominator, a count that is summed over all workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ptf.config.logprob_limits import LOGPROB_LIMITS
from ptf.config.section import AlgoConfig
from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group
from ptf.model.model import Model
from ptf.model.sampling import NO_LOGITS_PROCESSING, LogitsProcessing

# Each is a sum, which is divided by the denominator. Of a name that ends with `_max`, the largest value counts: of all
# micro-batches, ranks and minibatches of a step, and of all batches of a held-out set.
Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class FrozenModelSpec:
    """A frozen model that a loss uses."""

    path: str | None = None  # directory, Hugging Face id or URI; None: the model that training starts from
    same_architecture: bool = True  # must have the trained model's architecture; otherwise only its tokenizer


@dataclass(frozen=True)
class Context:
    """What a recipe reads of the job beside its own keys; the last three are of jobs with rollouts."""

    train_on: str = "assistant"  # `data.train_on`: which messages of a chat are trained
    sources: tuple[str, ...] = ()  # names of the training data
    processing: LogitsProcessing = NO_LOGITS_PROCESSING  # the distribution that responses are drawn from
    max_new_tokens: int = 1  # the largest number of tokens of a response
    # tokens whose log-probs in engine and trainer differ by more are counted
    logprob_diff_threshold: float = LOGPROB_LIMITS["fp32"].threshold


@dataclass(frozen=True)
class Recipe:
    """One training algorithm: how rows are encoded, which frozen models it uses, what the loss is, and what it is
    averaged over.

    A subclass declares the class of its keys (`config: MyConfig`), and defines `loss` and, without rollouts, `encode`.
    """

    config: AlgoConfig
    context: Context = Context()

    head: ClassVar[Literal["lm", "scalar"]] = "lm"
    # whether the loss is that of `context.processing`; without it, responses are drawn from the model's own
    # distribution only
    reads_processing: ClassVar[bool] = False

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """Frozen models by role name; none by default."""
        return {}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Return the pack units of a row: several split the row, and an empty list skips it."""
        why = (
            "trains on what the policy sampled"
            if self.config.online
            else "has no method `encode(row, tokenizer, source)`"
        )
        raise NotImplementedError(f"{type(self).__name__} {why}")

    def denominator(self, batch: Batch) -> Tensor:
        """Return what this batch adds to the denominator (documents, pairs or tokens), a float64 scalar; by default
        the trained tokens, by their weights."""
        return batch.loss_weights.sum(dtype=torch.float64)

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics as sums, which the step divides by the denominator of all workers; of a
        metric whose name ends with `_max`, the largest value of all batches and workers counts instead."""
        raise NotImplementedError(f"{type(self).__name__} has no method `loss(model, batch, frozen_models)`")

    def with_keys(self, **keys: Any) -> Self:
        """Return the recipe with other values of its keys."""
        return replace(self, config=self.config.model_copy(update=keys))

    @property
    def evaluated(self) -> "Recipe":
        """The recipe by which its models are evaluated."""
        return self

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return held-out metrics under their reported names."""
        return dict(metrics)

    @property
    def precompute(self) -> bool:
        """Whether the outputs of the frozen models are computed once, before training; they are then not in memory
        during training. By default the key `algo.precompute`, of recipes that have it."""
        return getattr(self.config, "precompute", False)

    @property
    def precomputed_from(self) -> tuple[object, ...]:
        """The key of the stored columns: every setting that changes what `precomputed_columns` returns.

        If a setting is missing here, a later run with another value of it silently uses the columns of the first. The
        code of a plugin is not part of the key: add a version number, and change it with the code."""
        return ()

    def precomputed_columns(
        self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]
    ) -> Mapping[str, Tensor]:
        """Return columns aligned with the targets, [B, T] or [B, T, k]; losses read them from `Batch.token_columns`."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to precompute")

    @property
    def scores_are_logits(self) -> bool:
        """Whether a score is the log-odds of a probability, so that its calibration is measured by `judgements`."""
        return False

    def judgements(self, model: Model, batch: Batch) -> Tensor:
        """Return predicted scores, labels and lengths of the scored responses: [3, responses]."""
        raise NotImplementedError(f"{type(self).__name__} scores no responses")

    # of recipes with rollouts, whose config class has `online = True`

    @property
    def critic(self) -> "CriticRecipe | None":
        """The recipe of the critic, a role of its own, or None. Its values are the column `values` of the trajectories
        that `compute_advantages` gets."""
        return None

    @property
    def update_epochs(self) -> int:
        """Passes over the rollouts of a step."""
        return 1

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps in each pass."""
        return 1

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether `compute_advantages` and `loss` need the column `old_logprobs`.

        If not, `loss` must return the metrics `logprob_diff_mean`, `logprob_diff_share` (of tokens beyond
        `context.logprob_diff_threshold`) and `logprob_diff_max`, as `GRPO.logprob_differences` computes them: the run
        compares them with the limits of `rollout` before each optimizer step.
        """
        return True

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return what is trained: pack units of samples with an advantage for each token, computed on the driver, in
        numpy. An episode that is not returned is not trained on."""
        raise NotImplementedError(f"{type(self).__name__} has no method `compute_advantages(groups)`")


@dataclass(frozen=True)
class CriticRecipe(Recipe):
    """The recipe that trains a critic: a model with a scalar head."""

    lr: float | None = None  # peak learning rate; None: the policy's
    warmup: int = 0  # steps at the start in which only the critic is trained
    # whether `compute_advantages` reads `value_after` of the trajectories that were truncated at a limit
    bootstrap_truncated: bool = False

    head: ClassVar[Literal["lm", "scalar"]] = "scalar"
