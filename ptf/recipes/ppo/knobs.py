"""Keys of proximal policy optimisation."""

from typing import TYPE_CHECKING, Literal

from ptf.config.section import Count, Fraction, PositiveFloat
from ptf.recipes.on_policy import RewardedKnobs

if TYPE_CHECKING:
    from ptf.config.schema import Job


class PPOKnobs(RewardedKnobs):
    """Proximal policy optimisation, with a critic that begins as the policy does, its head one new row."""

    gamma: Fraction = 1.0
    """Discount of a token."""
    lam: Fraction = 0.95
    """Of generalised advantage estimation: 1 takes what followed as it was, 0 the critic's word for it."""
    whiten: bool = True
    """Centre and scale advantages over all tokens of a step."""
    value_clip: PositiveFloat = 0.2
    """How far a value may move from what it was before it has no gradient."""
    critic_lr: PositiveFloat | None = None
    """Peak learning rate of the critic; default `train.lr`."""
    critic_warmup: Count = 0
    """Steps at the start in which the critic alone is trained."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """How it is estimated from a token (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Taken from each token's reward, or added to the loss."""

    def faults(self, job: "Job") -> list[str]:
        faults = super().faults(job)
        if job.model.backend == "hf":
            faults.append("model.backend: hf has no recipe ppo: a critic has a scalar head")
        return faults

    def not_with_a_nucleus(self) -> dict[str, bool]:
        return super().not_with_a_nucleus() | {"algo.critic_warmup; give 0": self.critic_warmup > 0}
