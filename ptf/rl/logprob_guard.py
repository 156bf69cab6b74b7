"""The guard over the log-probs of an engine: how far they may be from the trainer's before a run stops.

Engine and trainer round differently, and in bf16 the largest difference of many tokens grows with their number, so that
no bound separates it from a fault. The mean and the share of tokens beyond a threshold do not grow with it; the largest
difference is only reported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ptf.config.logprob_limits import LogprobLimits
from ptf.rl.weights.verification import LIKELY_CAUSES, LogprobMismatch

MEAN, SHARE, LARGEST = "logprob_diff_mean", "logprob_diff_share", "logprob_diff_max"  # metrics of recipes and steps


@dataclass(frozen=True)
class LogprobDifference:
    """The absolute differences between the engine's and the trainer's log-probs of many tokens."""

    mean: float
    share: float  # of the tokens beyond the threshold of the limits
    largest: float
    tokens: int

    @classmethod
    def of(cls, differences: np.ndarray, threshold: float) -> "LogprobDifference":
        """Return the mean and the largest of these differences [n], n at least 1, and the share of the tokens beyond
        `threshold`. A difference that is not a number is beyond every threshold."""
        beyond = ~(differences <= threshold)
        values = differences.astype(np.float64)
        return cls(float(values.mean()), float(beyond.mean()), float(values.max()), len(differences))

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float], tokens: int) -> "LogprobDifference":
        """Return the differences that a loss over this many tokens reports in its metrics."""
        return cls(metrics[MEAN], metrics[SHARE], metrics[LARGEST], tokens)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step."""
        return {MEAN: self.mean, SHARE: self.share, LARGEST: self.largest}

    def raise_if_beyond(self, limits: LogprobLimits, what: str) -> None:
        """Raise LogprobMismatch if the mean or the share exceeds its limit. `what` begins the message: whose log-probs.

        The share may exceed its limit by three standard deviations of the count of tokens beyond the threshold, so that
        a few tokens of a short text do not stop a run. With a limit of 0, the default in fp32, any token does.
        """
        if not self.mean <= limits.mean:
            raise LogprobMismatch(
                f"{what} differ by {self.mean:.3g} on average over {self.tokens} tokens "
                f"(the limit is {limits.mean:g}, by rollout.logprob_tolerance), by up to {self.largest:.3g}. "
                f"{LIKELY_CAUSES}"
            )
        if not self.share <= limits.share + 3 * math.sqrt(limits.share / self.tokens):
            raise LogprobMismatch(
                f"{what} differ by more than {limits.threshold:g} (by rollout.logprob_tolerance) for "
                f"{self.share:.3%} of {self.tokens} tokens (the limit is {limits.share:.3%}), "
                f"by up to {self.largest:.3g}. {LIKELY_CAUSES}"
            )
