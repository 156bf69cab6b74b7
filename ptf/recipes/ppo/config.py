"""Config keys of proximal policy optimisation."""

from typing import TYPE_CHECKING, Literal

from ptf.config.section import Count, Fraction, PositiveFloat, Rules
from ptf.recipes.online import RewardedConfig

if TYPE_CHECKING:
    from ptf.config.schema import Job


class PPOConfig(RewardedConfig):
    """Proximal policy optimisation; the critic starts as a copy of the policy with a new scalar head."""

    gamma: Fraction = 1.0
    """Discount factor per token."""
    lam: Fraction = 0.95
    """GAE λ, the λ of generalised advantage estimation: 1 uses the observed returns, 0 the one-step error
    r + γ V′ − V."""
    value_clip: PositiveFloat = 0.2
    """Where a value is further than this from its old value, its error is the larger of clipped and unclipped."""
    critic_lr: PositiveFloat | None = None
    """Peak learning rate of the critic; default `train.lr`."""
    critic_warmup: Count = 0
    """Steps at the start in which only the critic is trained."""
    bootstrap_truncated: bool = False
    """Where a response or episode was truncated at a limit, count the critic's value of the state after its last token
    as what would have followed; otherwise nothing follows."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL from a sampled token (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Subtract the KL from each token's reward, or add it to the loss."""

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys."""
        return {
            **super().config_rules(job),
            "algo.bootstrap_truncated has no effect with algo.overlong_filter, which trains on no response that was "
            "truncated at a limit; set one of them to false": self.bootstrap_truncated and self.overlong_filter,
            "rollout.top_p must be 1 while the critic is trained alone; set algo.critic_warmup: 0 or "
            "rollout.top_p: 1": job.online_rollout.top_p < 1 and self.critic_warmup,
        }
