"""What a recipe is: what differs between algorithms, and nothing else.

The one idea: a loss is a *sum*; the step divides it once, by the number of units that all workers together average over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group
from ptf.model.decoder import Decoder

Metrics = dict[str, Tensor]  # each a sum over the recipe's units


@dataclass(frozen=True)
class Companion:
    """A frozen model that a loss looks at."""

    path: str | None = None  # directory, Hugging Face id or URI; None: what training starts from
    revision: str | None = None
    alike: bool = True  # of the architecture of the model that trains; otherwise only its tokenizer must be the same


class Recipe(Protocol):
    online: ClassVar[bool]  # False: an SPMD gang. True: a controller and role groups
    head: ClassVar[Literal["lm", "scalar"]]

    @property
    def companions(self) -> Mapping[str, Companion]:
        """Frozen models by role name."""
        ...

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[Atom]:
        """None skips the row, several split it."""
        ...

    def units(self, batch: Batch) -> Tensor:
        """How many things this batch averages over, a float64 scalar."""
        ...

    def loss(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        """The sum over those units, and metrics that are sums over them too."""
        ...


class Annotating(Recipe, Protocol):
    """What the companions say can be found once, before training, and kept beside the tokens: then they are not there while it trains."""

    @property
    def precomputed(self) -> bool:
        """Whether it is."""
        ...

    @property
    def annotated_by(self) -> tuple[object, ...]:
        """What of the recipe decides what is found."""
        ...

    def annotations(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> Mapping[str, Tensor]:
        """Streams aligned with the targets, [B, T] or [B, T, k]; the loss finds them in `Batch.streams`."""
        ...


class Judging(Recipe, Protocol):
    """A recipe whose models score answers."""

    @property
    def is_probability(self) -> bool:
        """Whether a score is the log-odds of a probability, whose calibration is measured."""
        ...

    def judgements(self, model: Decoder, batch: Batch) -> Tensor:
        """Scores, rewards of the data, and lengths of the answers that were scored: [3, answers]."""
        ...


class Critic(Recipe, Protocol):
    """What a critic is trained by."""

    @property
    def lr(self) -> float | None:
        """Its peak learning rate; None: that of the policy."""
        ...

    @property
    def warmup(self) -> int:
        """Steps at the start in which it alone is trained."""
        ...


class Online(Recipe, Protocol):
    @property
    def critic(self) -> "Critic | None":
        """What a critic is trained by, a role of its own; its values are the stream `values` of what `credit` is given. None: there is no critic."""
        ...

    @property
    def epochs(self) -> int:
        """Passes over the rollouts of a step."""
        ...

    @property
    def minibatches(self) -> int:
        """Optimizer steps in each pass."""
        ...

    @property
    def needs_old(self) -> bool:
        """Whether the stream `old_logprobs` must be there for `credit` and `loss`; if not, the loss says by `max_logprob_diff` how far the engine's
        log-probs are from those that it finds itself."""
        ...

    def credit(self, groups: Sequence[Group]) -> list[Atom]:
        """Scored episodes to per-token advantages, on the driver, in numpy."""
        ...


def as_evaluated(recipe: Recipe) -> Recipe:
    """The recipe by which its models are evaluated: its own `evaluated`, where it has one, else itself."""
    return getattr(recipe, "evaluated", recipe)


def as_reported(recipe: Recipe, metrics: Mapping[str, float]) -> dict[str, float]:
    """Held-out metrics under the names that they are reported by: its own `reported`, where it has one, else as they are."""
    reported = getattr(recipe, "reported", dict)
    return reported(metrics)
