"""Recipes: what differs between algorithms, and nothing else. One algorithm a file.

The one idea: a loss is a *sum*; the step divides it once, by the number of units that all workers together average over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from ptf.config import Job, Plug, plug
from ptf.config.schema import DPOAlgo, KDAlgo, OPDAlgo, PPOAlgo, RMAlgo
from ptf.data.batch import Batch
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group
from ptf.model.decoder import Decoder
from ptf.model.sampling import Processing

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


class Online(Recipe, Protocol):
    @property
    def critic(self) -> "Recipe | None":
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


def build(job: Job) -> Recipe:
    """The job's recipe. A plugged one is called with its `args` and `algo`."""
    from ptf.recipes.dpo import DPO
    from ptf.recipes.grpo import GRPO
    from ptf.recipes.kd import KD, Teacher
    from ptf.recipes.opd import OPD
    from ptf.recipes.ppo import PPO
    from ptf.recipes.rm import RM
    from ptf.recipes.sft import SFT

    if isinstance(job.recipe, Plug):
        return plug.bind(job.recipe)(**job.algo)  # type: ignore[arg-type]
    if job.recipe == "sft":
        return SFT(job.data.train_on, tuple(job.data.sources))
    if isinstance(job.algo, KDAlgo):
        knobs = job.algo.model_dump(exclude={"teachers"})
        teachers = {name: Teacher(**teacher.model_dump()) for name, teacher in job.algo.teachers.items()}
        return KD(teachers, form=knobs.pop("loss"), train_on=job.data.train_on, **knobs)
    if isinstance(job.algo, DPOAlgo | RMAlgo):
        knobs = job.algo.model_dump()
        return {"dpo": DPO, "rm": RM}[job.recipe](form=knobs.pop("loss"), **knobs)
    assert job.rollout is not None
    how = Processing(job.rollout.temperature, job.rollout.top_p)
    if isinstance(job.algo, PPOAlgo):
        knobs = job.algo.model_dump(exclude={"critic_lr", "critic_warmup"})
        return PPO(**knobs, how=how, length=job.rollout.max_new_tokens)
    if isinstance(job.algo, OPDAlgo):
        knobs = job.algo.model_dump(exclude={"teacher", "teacher_revision"})
        return OPD(teacher=Companion(job.algo.teacher, job.algo.teacher_revision, alike=False), **knobs, how=how)
    return GRPO(**job.algo.model_dump(), how=how, length=job.rollout.max_new_tokens)  # type: ignore[union-attr]
