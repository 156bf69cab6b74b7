"""Config keys of group-relative policy optimisation and its family."""

from typing import TYPE_CHECKING, Literal

from ptf.recipes.online import RewardedConfig

if TYPE_CHECKING:
    from ptf.config.schema import Job


class GRPOConfig(RewardedConfig):
    """Group-relative policy optimisation and its family. RLOO: `baseline: leave_one_out`, `scale_by_std: false`.
    Dr.GRPO: `scale_by_std: false`, `mean_over: constant_length`. DAPO: `clip_high: 0.28`, `overlong`,
    `rollout.zero_variance_groups: replace`. GSPO: `ratio: sample`, `mean_over: samples`, clips near 3e-4.

    In `ratio` and `mean_over`, a sample is one answer (a "sequence" in the papers). An episode of several turns is one
    sample while each turn continues the context of the one before; a turn that does not begins another sample."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean over its group, or over the others in its group."""
    scale_by_std: bool = True
    """Divide the advantages of a group by their standard deviation (`baseline: mean`)."""
    ratio: Literal["token", "sample"] = "token"
    """What is clipped: each token's ratio to the old policy, or the geometric mean over its sample's tokens."""
    mean_over: Literal["tokens", "samples", "constant_length"] = "tokens"
    """How the losses of tokens become one. `tokens`: the mean over all tokens of an optimizer step. `samples`: the
    mean within each sample, then the mean over samples. `constant_length`: the sum within each sample, divided by
    `rollout.max_new_tokens`, then the mean over samples."""

    def faults(self, job: "Job") -> list[str]:
        """Return a line for each broken rule of these keys."""
        assert job.rollout is not None
        faults = super().faults(job)
        if job.rollout.group_size < 2:
            faults.append(
                "rollout.group_size must be at least 2: GRPO compares the answers to one prompt with each other"
            )
        if self.baseline == "leave_one_out" and self.scale_by_std:
            faults.append(
                "algo.scale_by_std must be false with algo.baseline: leave_one_out, which does not divide by the "
                "standard deviation; its default is true"
            )
        return faults
