"""The limits of a job for the differences between the engine's and the trainer's log-probs; without torch."""

from typing import NamedTuple

from ptf.config.schema import Job
from ptf.config.sections.rollout import LOGPROB_BOUND


class LogprobLimits(NamedTuple):
    """The permitted differences between the engine's and the trainer's log-probs of many tokens."""

    mean: float  # largest mean of the absolute differences
    bound: float  # tokens that differ by more than this count in `share`
    share: float  # largest share of the tokens that differ by more than `bound`


# In bf16 no bound on the largest difference works: it grows with the number of tokens, by rounding alone.
# Measured by benchmarks/logprob_guard.py (benchmarks/results/logprob_guard.md).
LOGPROB_LIMITS = {"fp32": LogprobLimits(1e-4, LOGPROB_BOUND["fp32"], 0.0), "bf16": LogprobLimits(0.2, 0.5, 0.05)}


def logprob_limits(job: Job) -> LogprobLimits:
    """Return the limits of a job with rollouts: its keys, or the defaults of its precision."""
    assert job.rollout is not None
    default = LOGPROB_LIMITS[job.train.precision]
    mean, bound = job.rollout.max_logprob_diff_mean, job.rollout.logprob_diff_bound
    share = job.rollout.max_logprob_diff_share
    return LogprobLimits(
        default.mean if mean is None else mean,
        default.bound if bound is None else bound,
        default.share if share is None else share,
    )
