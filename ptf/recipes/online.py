"""Config keys that algorithms with rollouts share, and the rules between them."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ptf.config.section import AlgoConfig, Count, Positive, PositiveFloat, Rules, changeable

if TYPE_CHECKING:
    from ptf.config.schema import Job


# `tis_cap: auto`, as in Yao et al. 2025: with `rollout.max_staleness` in any precision, else in bf16 (as which a
# precision counts that is not settled)
DEFAULT_TIS_CAP = 2.0


class OnlineConfig(AlgoConfig):
    """The clipped objective, which all recipes with rollouts share."""

    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    tis_cap: PositiveFloat | Literal["auto"] | None = "auto"
    """Truncated importance sampling (TIS): multiply each token's policy loss by min(π_old / π_engine, `tis_cap`), where
    π_old is the trainer's policy before the update. null: no such factor. `auto`: 2 in bf16, where the two
    probabilities differ by rounding, and with `rollout.max_staleness`; otherwise null."""
    tis_level: Literal["token", "sequence"] = "token"
    """How the importance weights of `tis_cap` are computed. `token`: each token has its own ratio π_old / π_engine.
    `sequence`: each token of a response has the product of the ratios of all its sampled tokens (in an episode, of
    consecutive turns whose context only grew)."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """What happens to weights beyond `tis_cap`. `truncate`: they are `tis_cap`. `mask`: tokens whose weight is above
    `tis_cap` or below its inverse are not trained on."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """`clip`: PPO's clipped objective, in which tokens whose ratio was clipped have no gradient. `cispo` (MiniMax
    2025): the clipped ratio is a constant weight of the gradient of each token's log-probability."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip (Ye et al. 2020), for `policy_loss: clip`: the loss of a token with a negative advantage A is at
    most `dual_clip` × |A| (verl: `clip_ratio_c`); 3 is usual. null: no bound."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a bonus for the entropy of each token's distribution."""
    update_epochs: Positive = 1
    """Number of passes over the rollouts of a step."""
    num_minibatches: Positive = 1
    """Number of optimizer steps in each pass over the rollouts."""

    online: ClassVar[bool] = True

    def in_force(self, job: "Job") -> "OnlineConfig":
        """Return these keys with the value of `tis_cap` at the job's precision."""
        if self.tis_cap != "auto":
            return self
        is_capped = job.train.precision != "fp32" or (job.rollout is not None and job.rollout.max_staleness)
        return self.model_copy(update={"tis_cap": DEFAULT_TIS_CAP if is_capped else None})

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys, among them those of `rollout.top_p` below 1: under another policy the
        nucleus differs, and may not contain a sampled token."""
        return {
            "algo.tis_mode and algo.tis_level have no effect without algo.tis_cap": (
                self.in_force(job).tis_cap is None and (self.tis_mode, self.tis_level) != ("truncate", "token")
            ),
            "algo.tis_cap must be above 1 with algo.tis_mode: mask, which leaves out weights above it and below its "
            "inverse": self.tis_mode == "mask" and isinstance(self.tis_cap, float) and self.tis_cap <= 1,
            "algo.dual_clip is for algo.policy_loss: clip": self.policy_loss == "cispo" and self.dual_clip is not None,
            "rollout.top_p: below 1, a second optimizer step trains a policy whose nucleus may not contain a sampled "
            "token; set algo.update_epochs: 1 and algo.num_minibatches: 1, or rollout.top_p: 1": (
                job.online_rollout.top_p < 1 and self.update_epochs * self.num_minibatches > 1
            ),
        }


class RewardedConfig(OnlineConfig):
    """What GRPO and PPO share beyond the clipped objective."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference, the model that training started from; 0 loads no reference."""
    overlong_buffer_tokens: Count = 0
    """Length penalty (DAPO), which is subtracted from the reward: it rises linearly from 0, this many tokens before
    `rollout.max_new_tokens`, to 1 at it. 0: no penalty."""
    overlong_filter: bool = changeable(False)
    """Do not train on responses and episodes that were truncated at a limit (DAPO's overlong filtering). GRPO still
    counts their rewards in the baseline of their group."""
    credit_level: Literal["episode", "turn"] = "episode"
    """Where the rewards of an episode's turns count. `episode`: their sum is the reward of the whole episode. `turn`:
    the reward of each turn counts for this turn and the turns before it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from a sampled token (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the reward."""

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys."""
        rollout = job.online_rollout
        return {
            **super().config_rules(job),
            "algo.kl_estimator: on policy, the gradient of k1 is 0 on average: in the loss it adds noise alone; use "
            "k2 or k3, or kl_in: reward": self.kl_coef and self.kl_estimator == "k1" and self.kl_in == "loss",
            "algo.credit_level: turn is for episodes (rollout.environment, play or harness); a response is one turn, "
            "whose credit is its reward; set algo.credit_level: episode": self.credit_level == "turn"
            and not rollout.is_multi_turn,
            "algo.overlong_buffer_tokens applies to single responses, because rollout.max_new_tokens limits each "
            "turn and not the episode (rollout.environment, play or harness); set it to 0": self.overlong_buffer_tokens
            and rollout.is_multi_turn,
            f"algo.overlong_buffer_tokens ({self.overlong_buffer_tokens}) is more than rollout.max_new_tokens "
            f"({rollout.max_new_tokens})": self.overlong_buffer_tokens > rollout.max_new_tokens,
            "rollout.top_p: below 1, the reference's nucleus may not contain a sampled token; set algo.kl_coef: 0 or "
            "rollout.top_p: 1": rollout.top_p < 1 and self.kl_coef,
        }
