"""Keys of on-policy distillation."""

from typing import TYPE_CHECKING

from ptf.recipes.on_policy import PolicyKnobs

if TYPE_CHECKING:
    from ptf.config.schema import Job


class OPDKnobs(PolicyKnobs):
    """On-policy distillation: the policy samples, and is moved towards what a teacher would have said, token by token. The reward is only reported."""

    teacher: str
    """What `model.path` may be, of any size and family; its tokenizer must be the student's."""
    teacher_revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""

    def model_paths(self) -> dict[str, str]:
        return {"teacher": self.teacher}

    def faults(self, job: "Job") -> list[str]:
        assert job.rollout is not None
        faults = super().faults(job)
        if job.rollout.equal == "replace":
            faults.append("rollout.equal: replace is for recipes that learn from rewards")
        return faults

    def not_with_a_nucleus(self) -> dict[str, bool]:
        return super().not_with_a_nucleus() | {"recipe opd: the teacher has another": True}
