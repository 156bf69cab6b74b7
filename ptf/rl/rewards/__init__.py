"""Rewards: functions, models, and code that is run. Configs name them by addresses such as `ptf.rl.rewards:exact`.

The functions are imported when one of them is first used, so that the processes of the sandbox in this package start
without them.
"""

from typing import Any

FUNCTIONS = ("brevity", "code", "exact", "judged_code", "mathematics", "numeric", "weighted", "weighted_at_once")


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ptf.rl.rewards import functions

    return getattr(functions, name)
