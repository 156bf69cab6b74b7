"""Keys of reward models."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ptf.config.section import Knobs
from ptf.recipes.rules import of_whole_answers, own_backend

if TYPE_CHECKING:
    from ptf.config.schema import Job


class RMKnobs(Knobs):
    """Reward models."""

    loss: Literal["pair", "binary", "regression"] = "pair"
    """`pair`: Bradley–Terry, of `chosen` and `rejected`. `binary`, `regression`: of `prompt`, `completion` and `reward`."""
    margin: bool = False
    """Rows of pairs have a number `margin`, by which the chosen answer's score is to be ahead."""
    centring: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of a pair's scores, which keeps them near 0."""

    def arguments(self) -> dict[str, Any]:
        knobs = super().arguments()
        return {"form": knobs.pop("loss"), **knobs}

    def faults(self, job: "Job") -> list[str]:
        faults = of_whole_answers(job) + own_backend(job)
        if self.loss != "pair" and (self.margin or self.centring):
            faults.append(f"algo.margin belongs to algo.loss: pair, like algo.centring, not to {self.loss}")
        if job.evaluate.sources:
            faults.append("evaluate.sources needs a model that generates text; a reward model is evaluated on data.validation")
        if job.model.head is not None or "head" in job.model.replace:
            faults.append("model.head: a reward model's head is a scalar one")
        return faults
