"""Keys of learning from preferences."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ptf.config.section import Knobs, PositiveFloat
from ptf.recipes.rules import ahead, compares_logprobs, of_whole_answers, own_backend

if TYPE_CHECKING:
    from ptf.config.schema import Job


class DPOKnobs(Knobs):
    """Preferences, by the policy's log-probs beside a reference's."""

    loss: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """`sigmoid`: DPO. `ipo`: a squared loss that does not push margins without end. `simpo`: means over tokens, and no reference."""
    beta: PositiveFloat = 0.1
    """How much the policy is held to the reference: the larger, the more."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that may be the wrong way round (`sigmoid`)."""
    length_normalised: bool = False
    """Means over the tokens of an answer instead of sums; with `simpo` always."""
    gamma: Annotated[float, Field(ge=0)] = 0.5
    """By how much the chosen answer is to be ahead (`simpo`)."""
    reference: str | None = None
    """Another reference than the model that training starts from: what `model.path` may be. With adapters alone (LoRA), the default costs no memory."""
    precomputed: bool = False
    """Take the reference's log-probs once, before training, and keep them in `{output}/annotated`: then the reference is not in memory while it trains."""

    def model_paths(self) -> dict[str, str]:
        return {"reference": self.reference} if self.reference else {}

    def arguments(self) -> dict[str, Any]:
        knobs = super().arguments()
        return {"form": knobs.pop("loss"), **knobs}

    def faults(self, job: "Job") -> list[str]:
        faults = of_whole_answers(job) + compares_logprobs(job) + own_backend(job)
        if self.loss == "simpo" and self.reference:
            faults.append("algo.reference: simpo has no reference")
        if self.loss == "simpo" and self.precomputed:
            faults.append("algo.precomputed: simpo has no reference")
        if self.loss != "sigmoid" and self.label_smoothing:
            faults.append(f"algo.label_smoothing belongs to algo.loss: sigmoid, not to {self.loss}")
        return faults + (ahead(job) if self.precomputed else [])
