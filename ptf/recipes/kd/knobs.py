"""Keys of knowledge distillation."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ptf.config.section import Knobs, Positive, PositiveFloat, Section
from ptf.recipes.rules import ahead, compares_logprobs, own_backend

if TYPE_CHECKING:
    from ptf.config.schema import Job


class TeacherConfig(Section):
    """A model that the student learns from; its tokenizer must be the student's."""

    path: str
    """What `model.path` may be."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    weight: PositiveFloat = 1.0
    """Its share, relative to the other teachers."""


class KDKnobs(Knobs):
    """Knowledge distillation: predict what teachers predict."""

    teachers: dict[Annotated[str, Field(pattern=r"^\w+$")], TeacherConfig] = Field(min_length=1)
    """By name; of any size and family."""
    loss: Literal["forward", "reverse", "js"] = "forward"
    """`forward`: KL(teacher ‖ student), which covers all that the teacher may say. `reverse`: KL(student ‖ teacher), which keeps to what it is likely
    to say. `js`: generalised Jensen–Shannon, between them."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share in the mean that `js` looks at."""
    temperature: PositiveFloat = 1.0
    """Both distributions are taken at it; the divergence counts temperature² times."""
    ce: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy of the data, on top of the divergence."""
    top_k: Positive | None = None
    """Look at each teacher's likeliest tokens, and at all others as one, instead of at the whole vocabulary."""
    precomputed: bool = False
    """Find those once, before training, and keep them in `{output}/annotated`: then no teacher is in memory while it trains. Needs `top_k`."""

    held_out_metric: ClassVar[str] = "kl"

    def model_paths(self) -> dict[str, str]:
        return {f"teachers.{name}.path": teacher.path for name, teacher in self.teachers.items()}

    def arguments(self) -> dict[str, Any]:
        knobs = super().arguments()
        return {"form": knobs.pop("loss"), **knobs}

    def faults(self, job: "Job") -> list[str]:
        faults = compares_logprobs(job) + own_backend(job)
        if self.loss != "js" and self.beta != type(self).model_fields["beta"].default:
            faults.append(f"algo.beta belongs to algo.loss: js, not to {self.loss}")
        if self.precomputed and self.top_k is None:
            faults.append("algo.precomputed needs algo.top_k: whole distributions are too large to be kept")
        return faults + (ahead(job) if self.precomputed else [])
