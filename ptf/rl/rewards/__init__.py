"""Rewards: functions, reward models, code that is run, and requests to servers.

A config names a built-in reward by the address of this package, such as `ptf.rl.rewards:exact`; `scores_groups` and
`batched` declare what a reward of your own is called with. The names of `DEFINED_IN` are imported when they are first
used, so that the processes of the sandbox, which is in this package too, start without them. A new built-in reward is a
function in `functions.py`, or a class in a file of its own, and a name in `DEFINED_IN`.
"""

import importlib
from typing import Any

DEFINED_IN = {  # name in this package → where it is defined: module and name
    **{name: ("functions", name) for name in ("brevity", "code", "exact", "mathematics", "numeric")},
    "http": ("http_reward", "HttpReward"),
    "http_batch": ("http_reward", "HttpBatchReward"),
    "judge": ("judge_reward", "JudgeReward"),
    "weighted": ("weighted_sum", "WeightedSum"),
    "scores_groups": ("declarations", "scores_groups"),
    "batched": ("declarations", "batched"),
    "EpisodeView": ("calls", "EpisodeView"),
}


def __getattr__(name: str) -> Any:
    if name not in DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, defined = DEFINED_IN[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), defined)
