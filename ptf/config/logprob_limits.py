"""How far log-probs of two forward passes may be apart: of one short text, and of the tokens that a job samples.

It imports no torch.
"""

from typing import NamedTuple

from ptf.config.schema import Job

# A small model trained to a sharp function turns fp32 rounding (1e-7) into 1e-4 on tokens that it is unsure of:
# measured against float64, in the trainer and in vLLM alike.
LOGPROB_TOLERANCE = {"fp32": 1e-3, "bf16": 0.2}
"""The largest difference between two forward passes' log-probs of one token of a short text that is rounding and not an
error, by precision. The load check of a published model and `ptf check-engine` use it."""


class LogprobLimits(NamedTuple):
    """The permitted differences between the engine's and the trainer's log-probs of many tokens."""

    mean: float  # largest mean of the absolute differences
    threshold: float  # tokens that differ by more than this count in `share`
    share: float  # largest share of the tokens that differ by more than `threshold`


# In bf16 no bound on the largest difference works: it grows with the number of tokens, by rounding alone.
# Measured by benchmarks/logprob_guard.py (benchmarks/results/logprob_guard.md).
LOGPROB_LIMITS = {"fp32": LogprobLimits(1e-4, LOGPROB_TOLERANCE["fp32"], 0.0), "bf16": LogprobLimits(0.2, 0.5, 0.05)}
LOGPROB_LIMITS["auto"] = LOGPROB_LIMITS["bf16"]  # of a job that is looked at before its precision is settled

# In fp32 rounding changes the experts of one token in a million. It moves that token by up to 1 and, through attention,
# those that follow by 1e-3 to 1e-1: no fault, though a step of a few thousand tokens may have a mean of 1e-3 then. In
# bf16 the limits above have room for it.
LIMITS_WITH_EXPERTS = {**LOGPROB_LIMITS, "fp32": LogprobLimits(1e-3, LOGPROB_TOLERANCE["fp32"], 0.01)}


def logprob_limits(job: Job, *, experts: bool = False) -> LogprobLimits:
    """Return the limits of a job with rollouts: those of its precision, and of whether the model has experts, times
    `rollout.logprob_tolerance`."""
    mean, threshold, share = (LIMITS_WITH_EXPERTS if experts else LOGPROB_LIMITS)[job.train.precision]
    factor = job.online_rollout.logprob_tolerance
    return LogprobLimits(factor * mean, factor * threshold, share)
