"""Config keys of on-policy distillation."""

from typing import TYPE_CHECKING

from ptf.recipes.online import OnlineConfig

if TYPE_CHECKING:
    from ptf.config.schema import Job


class OPDConfig(OnlineConfig):
    """On-policy distillation: the policy samples and is moved, token by token, towards what a teacher would have
    predicted. The reward is only reported."""

    teacher: str
    """Path of the teacher, as for `model.path`, of any size and family; its tokenizer must be the student's."""

    def model_paths(self) -> dict[str, str]:
        """Return the teacher's path."""
        return {"teacher": self.teacher}

    def config_errors(self, job: "Job") -> list[str]:
        """Return a line for each broken rule of these keys."""
        assert job.rollout is not None
        errors = super().config_errors(job)
        if job.rollout.max_resampling_rounds:
            errors.append("rollout.max_resampling_rounds is for recipes that learn from rewards; opd only reports them")
        return errors

    def excluded_by_top_p(self) -> list[str]:
        """Exclude `rollout.top_p` below 1 always, because the teacher has another nucleus."""
        return ["rollout.top_p must be 1 with recipe opd: the teacher's nucleus may not contain a sampled token"]
