"""Rewards: functions, reward models, and code that is run.

A config names a function by the address of this package, such as `ptf.rl.rewards:exact`; the functions of `FUNCTIONS`
are defined in `ptf.rl.rewards.functions`. They are imported when one of them is first used, so that the processes of
the sandbox, which is in this package too, start without them. A new built-in reward is a function in `functions.py`
and a name in `FUNCTIONS`.
"""

from typing import Any

FUNCTIONS = ("brevity", "code", "exact", "code_async", "mathematics", "numeric", "weighted", "weighted_concurrently")


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ptf.rl.rewards import functions

    return getattr(functions, name)
