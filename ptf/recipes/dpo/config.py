"""Config keys of learning from preferences."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ptf.config.section import AlgoConfig, PositiveFloat, Rules
from ptf.recipes.rules import comparison_rules, whole_answer_rules

if TYPE_CHECKING:
    from ptf.config.schema import Job


class DPOConfig(AlgoConfig):
    """Preferences: the policy's log-probs are compared with those of a reference."""

    loss_type: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """`sigmoid`: DPO. `ipo`: a squared loss, which bounds the margins. `simpo`: means over tokens, without a
    reference."""
    beta: PositiveFloat = 0.1
    """Strength of the constraint to the reference: the larger it is, the closer the policy stays to the reference.
    With `loss_type: simpo`, which has no reference, it only scales the margin."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose preference may be wrong (`sigmoid`)."""
    length_normalised: bool = False
    """Take means over the tokens of a response instead of sums; `simpo` always does."""
    gamma: Annotated[float, Field(ge=0)] = 0.5
    """`simpo`: target reward margin γ of the loss −log σ(β·Δ − γ), where Δ is the difference of mean log-probs per
    token. The default of `beta` is DPO's; the SimPO paper has about 2, so set both."""
    reference: str | None = None
    """Path of the reference, as for `model.path`; the default is the model that training starts from, which costs no
    additional memory if only adapters train (LoRA)."""
    precompute: bool = False
    """Compute the reference's log-probs once, before training, and keep them in `{output}/precomputed`; the
    reference is then not in memory during training."""

    def model_paths(self) -> dict[str, str]:
        """Return the reference's path, if the job names one."""
        return {"reference": self.reference} if self.reference else {}

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules of these keys."""
        return {
            **whole_answer_rules(job),
            "algo.reference: simpo has no reference": self.loss_type == "simpo" and self.reference,
            "algo.precompute: simpo has no reference": self.loss_type == "simpo" and self.precompute,
            f"algo.label_smoothing belongs to algo.loss_type: sigmoid, not to {self.loss_type}": (
                self.loss_type != "sigmoid" and self.label_smoothing
            ),
            f"algo.gamma belongs to algo.loss_type: simpo, not to {self.loss_type}": (
                self.loss_type != "simpo" and self.gamma != DPOConfig.model_fields["gamma"].default
            ),
            **comparison_rules(job, self.precompute),
        }
