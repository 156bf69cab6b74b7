"""Recipes: what differs between algorithms, and nothing else. One algorithm a file.

The one idea: a loss is a *sum*; the step divides it once, by the number of units that all workers together average over.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from ptf.config import Job, Plug, plug
from ptf.config.schema import DPOAlgo, RMAlgo
from ptf.data.batch import Batch
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group
from ptf.model.decoder import Decoder

Metrics = dict[str, Tensor]  # each a sum over the recipe's units


class Recipe(Protocol):
    online: ClassVar[bool]  # False: an SPMD gang. True: a controller and role groups
    head: ClassVar[Literal["lm", "scalar"]]

    @property
    def companions(self) -> Mapping[str, str | None]:
        """Frozen models by role name: where each is; None is what training starts from."""
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


class Online(Recipe, Protocol):
    @property
    def epochs(self) -> int:
        """Passes over the rollouts of a step."""
        ...

    @property
    def minibatches(self) -> int:
        """Optimizer steps in each pass."""
        ...

    def credit(self, groups: Sequence[Group]) -> list[Atom]:
        """Scored episodes to per-token advantages, on the driver, in numpy."""
        ...


def build(job: Job) -> Recipe:
    """The job's recipe. A plugged one is called with its `args` and `algo`."""
    from ptf.recipes.dpo import DPO
    from ptf.recipes.grpo import GRPO
    from ptf.recipes.rm import RM
    from ptf.recipes.sft import SFT

    if isinstance(job.recipe, Plug):
        return plug.bind(job.recipe)(**job.algo)  # type: ignore[arg-type]
    if job.recipe == "sft":
        return SFT(job.data.train_on, tuple(job.data.sources))
    if isinstance(job.algo, DPOAlgo | RMAlgo):
        knobs = job.algo.model_dump()
        return {"dpo": DPO, "rm": RM}[job.recipe](form=knobs.pop("loss"), **knobs)
    assert job.rollout is not None
    return GRPO(**job.algo.model_dump(), temperature=job.rollout.temperature)  # type: ignore[union-attr]
