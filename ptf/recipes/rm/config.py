"""Config keys of reward models."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ptf.config.section import AlgoConfig, Rules
from ptf.recipes.rules import whole_answer_rules

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

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys."""
        return {
            **whole_answer_rules(job),
            **{
                f"algo.{name} belongs to algo.loss_type: pair, not to {self.loss_type}": self.loss_type != "pair"
                and getattr(self, name)
                for name in ("margin", "center_coef")
            },
            "evaluate.sources needs a model that generates text; a reward model is evaluated on data.validation": (
                job.evaluate.sources
            ),
            "model.head: a reward model has a scalar head of its own; remove the key": job.model.head
            or "head" in job.model.replace,
        }
