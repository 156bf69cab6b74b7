"""ptf: a post-training framework for large language models.

    import ptf

    job = ptf.load("job.yaml", overrides=["train.steps=100"])
    ptf.check(job)
    run = ptf.train(job)
    ptf.evaluate(run)
    ptf.publish(run)

Importing ptf imports nothing else: each name is loaded when it is first used. It sets one variable of the environment,
GOMP_SPINCOUNT, of which torch takes notice if it is imported later.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptf.api import chat, check, evaluate, inspect, load, publish, replay, serve, train, try_episodes
    from ptf.config import Job
    from ptf.errors import UserError
    from ptf.serving.conversation import Chat
    from ptf.training_run import Run

__version__ = "0.1.0"

# How often a thread of OpenMP looks again before it sleeps, while it waits for the others of a parallel section. By
# default it looks for a millisecond and more, and where a machine has other work, too, it keeps its core from the
# thread that it waits for. OpenMP reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The directories of plugins, as a parent process found them (ptf.config.plugin.on_path). They are last, so that a file
# in them, such as queue.py, hides no module of Python and no installed package.
_PLACES = os.environ.get("PTF_PLUGIN_PATH", "").split(os.pathsep)
sys.path += [place for place in _PLACES if place and place not in sys.path]

__all__ = [
    "Chat",
    "Job",
    "Run",
    "UserError",
    "__version__",
    "chat",
    "check",
    "evaluate",
    "inspect",
    "load",
    "publish",
    "replay",
    "serve",
    "train",
    "try_episodes",
]

# where the names are that are not in ptf.api
_MODULES = {"Chat": "serving.conversation", "Job": "config", "Run": "training_run", "UserError": "errors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ptf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ptf.{_MODULES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _StagePackage(ModuleType):
    """A package that can be called: `ptf.train` is both the package of the training code and the function that trains a
    job, and Python keeps one attribute for both. The same holds for `ptf.evaluate` and `ptf.publish`."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Do what the function of this name in ptf.api does."""
        from ptf import api

        return getattr(api, self.__name__.rpartition(".")[2])(*arguments, **named)


for _stage in ("ptf.train", "ptf.evaluate", "ptf.publish"):
    importlib.import_module(_stage).__class__ = _StagePackage  # they are empty, so this costs nothing
