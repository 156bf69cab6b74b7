"""Config keys of on-policy distillation."""

from typing import TYPE_CHECKING

from ptf.config.section import Rules
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

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys; `rollout.top_p` must be 1, because the teacher has another nucleus."""
        others = super().config_rules(job).items()
        return {
            **{line: breaks for line, breaks in others if not line.startswith("rollout.top_p:")},
            "rollout.max_resampling_rounds is for recipes that learn from rewards; opd only reports them": (
                job.online_rollout.max_resampling_rounds
            ),
            "rollout.top_p must be 1 with recipe opd: the teacher's nucleus may not contain a sampled token": (
                job.online_rollout.top_p < 1
            ),
        }
