"""The flow of any recipe, whose process is killed once, where CRASH says: `STEP module:function call [items]`, at that
call of a function within that step; with `items`, after so many of what it returns have been taken. GIVE_UP_S:
for how long a store may fail."""

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.base import PostTrainFlow
from ptf.storage import store


class CrashingFlow(PostTrainFlow):
    def _stage(self, work: Any) -> None:
        store.GIVE_UP_S = float(os.environ.get("GIVE_UP_S", store.GIVE_UP_S))
        step, *where = os.environ.get("CRASH", "nowhere").split()
        if work.__name__ == step and not Path("crashed").exists():
            arm(*where)
        super()._stage(work)


def arm(place: str, call: str, items: str | None = None) -> None:
    module, name = place.split(":")
    owner, left = importlib.import_module(module), int(call)
    real = getattr(owner, name)

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            return some(real(*args, **named), int(items)) if items else die()
        return real(*args, **named)

    setattr(owner, name, counted)


def some(found: list[Any], count: int) -> Iterator[Any]:
    yield from found[:count]
    die()


def die() -> None:
    Path("crashed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    CrashingFlow()
