"""Config keys of knowledge distillation."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ptf.config.section import WORD, AlgoConfig, Positive, PositiveFloat, Rules, Section
from ptf.recipes.rules import comparison_rules

if TYPE_CHECKING:
    from ptf.config.schema import Job


class TeacherConfig(Section):
    """A model that the student learns from; its tokenizer must be the student's."""

    path: str
    """Path of the teacher, as for `model.path`."""
    weight: PositiveFloat = 1.0
    """Its share, relative to the other teachers."""


class KDConfig(AlgoConfig):
    """Knowledge distillation: the student learns to predict what teachers predict."""

    teachers: dict[Annotated[str, Field(pattern=WORD)], TeacherConfig] = Field(min_length=1)
    """The teachers, by name; of any size and family."""
    loss_type: Literal["forward", "reverse", "js"] = "forward"
    """`forward`: KL(teacher ‖ student), which covers all that the teacher may predict. `reverse`: KL(student ‖
    teacher), which concentrates on what is likely. `js`: generalised Jensen–Shannon, between the two."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share in the mixture of `js`."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions; the divergence is multiplied by its square."""
    ce_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy of the data, on top of the divergence."""
    top_k: Positive | None = None
    """Compare the teacher's likeliest tokens, and all others as one, instead of the whole vocabulary."""
    precompute: bool = False
    """Compute the teachers' likeliest tokens once, before training, and keep them in `{output}/precomputed`; no
    teacher is then in memory during training. Needs `top_k`."""

    held_out_metric: ClassVar[str] = "kl"

    def model_paths(self) -> dict[str, str]:
        """Return the path of each teacher."""
        return {f"teachers.{name}.path": teacher.path for name, teacher in self.teachers.items()}

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys."""
        return {
            f"algo.beta belongs to algo.loss_type: js, not to {self.loss_type}": (
                self.loss_type != "js" and self.beta != type(self).model_fields["beta"].default
            ),
            "algo.precompute needs algo.top_k: whole distributions are too large to store": (
                self.precompute and self.top_k is None
            ),
            **comparison_rules(job, self.precompute),
        }
