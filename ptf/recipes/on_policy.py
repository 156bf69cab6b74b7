"""Keys that algorithms with rollouts share, and the rules between them."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ptf.config.section import Count, Knobs, Positive, PositiveFloat

if TYPE_CHECKING:
    from ptf.config.schema import Job


class PolicyKnobs(Knobs):
    """What recipes with rollouts share: the clipped objective."""

    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    max_importance: PositiveFloat | None = None
    """Weigh tokens by how much likelier the trainer finds them than the engine did, up to this; null weighs all alike."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a bonus for the entropy of each token's distribution."""
    epochs: Positive = 1
    """Passes over the rollouts of a step."""
    minibatches: Positive = 1
    """Optimizer steps in each pass."""

    on_policy: ClassVar[bool] = True

    def faults(self, job: "Job") -> list[str]:
        """Of `rollout.top_p` below 1: another policy has another nucleus, in which what was drawn need not be."""
        assert job.rollout is not None
        what = "rollout.top_p: a nucleus is taken of one policy's distribution, so it cannot be with"
        broken = self.not_with_a_nucleus() if job.rollout.top_p < 1 else {}
        return [f"{what} {other}" for other, there in broken.items() if there]

    def not_with_a_nucleus(self) -> dict[str, bool]:
        """What `rollout.top_p` below 1 excludes → whether it is configured."""
        several = self.epochs * self.minibatches > 1
        return {"several updates from the same rollouts; give algo.epochs: 1 and algo.minibatches: 1": several}


class RewardedKnobs(PolicyKnobs):
    """What GRPO and PPO share besides."""

    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference, the model that training started from; 0 loads no reference."""
    overlong: Count = 0
    """Answers within so many tokens of `rollout.max_new_tokens` lose reward, in a straight line down to -1."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from a token (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from the reward."""

    def faults(self, job: "Job") -> list[str]:
        assert job.rollout is not None
        faults = super().faults(job)
        if self.kl and self.kl_estimator == "k1" and self.kl_in == "loss":
            faults.append(
                "algo.kl_estimator: the gradient of k1 is 0 on average, so in the loss it holds the policy to nothing; use k2 or k3, or kl_in: reward"
            )
        if self.overlong and job.rollout.environment:
            faults.append("algo.overlong is about single answers; an environment gives the rewards of its episodes")
        if self.overlong > job.rollout.max_new_tokens:
            faults.append(f"algo.overlong ({self.overlong}) is more than rollout.max_new_tokens ({job.rollout.max_new_tokens})")
        return faults

    def not_with_a_nucleus(self) -> dict[str, bool]:
        return super().not_with_a_nucleus() | {"algo.kl; give 0": self.kl > 0}
