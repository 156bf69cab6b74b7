"""Config keys of group-relative policy optimisation and its family."""

from typing import TYPE_CHECKING, Literal

from ptf.config.section import Fraction, Rules
from ptf.recipes.online import RewardedConfig

if TYPE_CHECKING:
    from ptf.config.schema import Job


class GRPOConfig(RewardedConfig):
    """Group-relative policy optimisation and its family. RLOO: `baseline: leave_one_out`, `scale_by_std: false`.
    Dr.GRPO: `scale_by_std: false`, `loss_aggregation: constant_length`. DAPO: `clip_high: 0.28`,
    `overlong_buffer_tokens`, `rollout.max_resampling_rounds: 8`. GSPO: `importance_sampling_level: sequence`,
    `loss_aggregation: episode_mean`, clips near 3e-4."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean over its group, or over the others in its group."""
    scale_by_std: bool = True
    """Divide the advantages of a group by their standard deviation (`baseline: mean`)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Which ratio to the old policy is clipped. `token`: each token's. `sequence` (GSPO): the geometric
    mean of the ratios of the tokens of one response; in an episode, of consecutive turns whose context only grew: a
    context that is encoded again begins a new one. "Sequence" here means one response, not a packed sequence as in
    `train.global_batch_sequences`."""
    loss_aggregation: Literal["token_mean", "episode_mean", "constant_length"] = "token_mean"
    """How the losses of tokens become one. `token_mean`: the mean over all tokens of an optimizer step.
    `episode_mean`: the mean within each episode, which is one response or all its turns, then the mean over episodes.
    `constant_length`: the sum within each episode, divided by `rollout.max_new_tokens`, then the mean over episodes."""
    turn_discount: Fraction = 1.0
    """With `credit_level: turn`, a turn is credited with its reward plus this times the credit of the next turn: 1 is
    the sum of what follows, 0 the reward of the turn alone."""

    def without_effect(self, job: "Job") -> list[str]:
        """Return a line for each factor on all rewards of a group that is divided out with their standard deviation."""
        config = job.rollout
        added = config is None or config.reward_model or self.overlong_buffer_tokens  # to the rewards
        if config is None or not self.scale_by_std or added or (self.kl_coef and self.kl_in == "reward"):
            return []
        return [
            f"{'.'.join(filter(None, ('rollout', key, name)))}.weight: {what.weight:g} has no effect: "
            "algo.scale_by_std divides the rewards of a group by their standard deviation; the `sampling_weight` of a "
            "source sets how much of it is trained"
            for key, of in (("reward", config.reward), ("environment", config.environment))
            for name, what in of.items()
            if what.weight > 0 and what.weight != 1
        ]

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys."""
        return {
            **super().config_rules(job),
            "rollout.group_size must be at least 2: GRPO compares the responses to one prompt with each other": (
                job.online_rollout.group_size < 2
            ),
            "algo.policy_loss: cispo weights each token; set algo.importance_sampling_level: token": (
                self.policy_loss == "cispo" and self.importance_sampling_level == "sequence"
            ),
            "algo.scale_by_std must be false with algo.baseline: leave_one_out, which does not divide by the "
            "standard deviation; its default is true": self.baseline == "leave_one_out" and self.scale_by_std,
            "algo.baseline must be leave_one_out with algo.credit_level: turn (and algo.scale_by_std: false): where "
            "episodes differ in their numbers of turns, a mean that includes the episode itself, and a standard "
            "deviation of the turn, bias the gradient": self.credit_level == "turn"
            and self.baseline != "leave_one_out",
            "algo.turn_discount has no effect without algo.credit_level: turn; set that, or remove it": (
                self.turn_discount != 1 and self.credit_level != "turn"
            ),
        }
