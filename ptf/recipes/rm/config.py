"""Config keys of reward models."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ptf.config.section import AlgoConfig
from ptf.recipes.rules import whole_answer_errors

if TYPE_CHECKING:
    from ptf.config.schema import Job


class RMConfig(AlgoConfig):
    """Reward models: a scalar head scores responses."""

    loss_type: Literal["pair", "binary", "regression"] = "pair"
    """`pair`: Bradley–Terry, on rows with `chosen` and `rejected`. `binary`, `regression`: on rows with `prompt`,
    `completion` and `reward`."""
    margin: bool = False
    """Use the number `margin` of each pair's row: the chosen response's score should be higher by that margin."""
    center_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of a pair's scores, which keeps them near 0."""

    def config_errors(self, job: "Job") -> list[str]:
        """Return a line for each broken rule of these keys."""
        errors = whole_answer_errors(job)
        if self.loss_type != "pair":
            configured = [name for name in ("margin", "center_coef") if getattr(self, name)]
            errors += [f"algo.{name} belongs to algo.loss_type: pair, not to {self.loss_type}" for name in configured]
        if job.evaluate.sources:
            errors.append(
                "evaluate.sources needs a model that generates text; a reward model is evaluated on data.validation"
            )
        if job.model.head is not None or "head" in job.model.replace:
            errors.append("model.head: a reward model has a scalar head of its own; remove the key")
        return errors
