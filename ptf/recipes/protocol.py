"""The protocol of recipes: the parts of training in which algorithms differ, and nothing else.

A loss is a *sum*; the step divides it once, by the denominator, a count that is summed over all workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.sample import PackUnit
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group
from ptf.model.decoder import Decoder

# Each is a sum, which is divided by the denominator. Of a name that ends with `_max`, the largest value counts: of all
# micro-batches, ranks and minibatches of a step, and of all batches of a held-out set.
Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class FrozenModelSpec:
    """A frozen model that a loss uses."""

    path: str | None = None  # directory, Hugging Face id or URI; None: the model that training starts from
    same_architecture: bool = True  # must have the trained model's architecture; otherwise only its tokenizer


class Recipe(Protocol):
    """One training algorithm: how rows are encoded, which frozen models it uses, what the loss is, and what it is
    averaged over."""

    # False: an SPMD gang. True: a controller and role groups. A built-in recipe has the value of its config class.
    online: ClassVar[bool]
    head: ClassVar[Literal["lm", "scalar"]]

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """Frozen models by role name."""
        ...

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Return the pack units of a row: several split the row, and an empty list skips it."""
        ...

    def denominator(self, batch: Batch) -> Tensor:
        """Return what this batch adds to the denominator (documents, pairs or tokens), a float64 scalar."""
        ...

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics as sums, which the step divides by the denominator of all workers; of a
        metric whose name ends with `_max`, the largest value of all batches and workers counts instead."""
        ...


class PrecomputingRecipe(Recipe, Protocol):
    """A recipe whose frozen models' contribution can be computed once, before training; they are then not in memory
    during training."""

    @property
    def precompute(self) -> bool:
        """Whether the outputs of the frozen models are computed once, before training."""
        ...

    @property
    def precomputed_from(self) -> tuple[object, ...]:
        """The key of the stored columns: every setting that changes what `precomputed_columns` returns.

        If a setting is missing here, a later run with another value of it silently uses the columns of the first. The
        code of a plugin is not part of the key: add a version number, and change it with the code."""
        ...

    def precomputed_columns(
        self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]
    ) -> Mapping[str, Tensor]:
        """Return columns aligned with the targets, [B, T] or [B, T, k]; losses read them from `Batch.token_columns`."""
        ...


class ScoringRecipe(Recipe, Protocol):
    """A recipe whose models score responses."""

    @property
    def scores_are_logits(self) -> bool:
        """Whether a score is the log-odds of a probability, so that its calibration is measured."""
        ...

    def judgements(self, model: Decoder, batch: Batch) -> Tensor:
        """Return predicted scores, labels and lengths of the scored responses: [3, responses]."""
        ...


class CriticRecipe(Recipe, Protocol):
    """The recipe that trains a critic."""

    @property
    def lr(self) -> float | None:
        """Peak learning rate of the critic; None: the policy's."""
        ...

    @property
    def warmup(self) -> int:
        """Steps at the start in which only the critic is trained."""
        ...


class OnlineRecipe(Recipe, Protocol):
    """A recipe that trains on rollouts."""

    @property
    def critic(self) -> "CriticRecipe | None":
        """The recipe of the critic, a role of its own, or None. Its values are the column `values` of the trajectories
        that `compute_advantages` gets."""
        ...

    @property
    def update_epochs(self) -> int:
        """Passes over the rollouts of a step."""
        ...

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps in each pass."""
        ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether `compute_advantages` and `loss` need the column `old_logprobs`.

        If not, `loss` must return the metrics `logprob_diff_mean`, `logprob_diff_share` (of tokens beyond
        `logprob_diff_threshold`) and `logprob_diff_max`, as `GRPO.logprob_differences` computes them: the run compares
        them with the limits of `rollout` before each optimizer step.
        """
        ...

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return what is trained: pack units of samples with an advantage for each token, computed on the driver, in
        numpy. An episode that is not returned is not trained on."""
        ...


def bootstraps_truncated(recipe: OnlineRecipe) -> bool:
    """Return whether `compute_advantages` reads `value_after` of the trajectories that were truncated at a limit: the
    critic's own `bootstrap_truncated` if it has one, else False."""
    return getattr(recipe.critic, "bootstrap_truncated", False)


def as_evaluated(recipe: Recipe) -> Recipe:
    """Return the recipe by which its models are evaluated: its own `evaluated` if it has one, else itself."""
    return getattr(recipe, "evaluated", recipe)


def as_reported(recipe: Recipe, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return held-out metrics under their reported names: by the recipe's own `reported` if it has one, else
    unchanged."""
    reported = getattr(recipe, "reported", dict)
    return reported(metrics)
