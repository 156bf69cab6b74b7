"""The recipes of ptf by the name that a config gives them, and the classes of their section `algo`; without torch.

Adding a recipe to ptf adds a package, a name here, and flows/NAME_flow.py; a recipe of the user's own needs none of
these: its class declares the class of its keys, as those of ptf do (`config: MyConfig`).
"""

import importlib
import inspect
import json
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ptf.config import plugin
from ptf.config.section import AlgoConfig, Plugin
from ptf.config.tree import ConfigError
from ptf.workspace.credentials import resolved

if TYPE_CHECKING:
    from ptf.config.schema import Job


# `config.py` of the package ptf.recipes.NAME has the class NAMEConfig, `recipe.py` the class NAME, in capitals
RECIPES = ("sft", "dpo", "kd", "rm", "grpo", "ppo", "opd")

STALENESS_NEEDS_CAP = (
    "with rollout.max_staleness responses have tokens of earlier weights, and the loss must be corrected for it; give "
    "a cap (2 is usual)"
)


@cache
def algo_config_of(recipe: str) -> type[AlgoConfig]:
    """Return the class of an algorithm's section `algo`; it imports no torch."""
    return getattr(importlib.import_module(f"ptf.recipes.{recipe}.config"), f"{recipe.upper()}Config")


def declared_config(recipe: object, use: str) -> type[AlgoConfig]:
    """Return the class of the keys of a recipe's class: what it, or a class that it inherits from, says of `config`.

    Raises ConfigError for something that is no recipe.
    """
    for base in inspect.getmro(recipe) if isinstance(recipe, type) else ():
        if config := inspect.get_annotations(base, eval_str=True).get("config"):
            return config
    raise ConfigError(
        f"{use} is no recipe: write a class that inherits from ptf.recipes.protocol.Recipe, or from a recipe of ptf"
    )


def algo_config(job: "Job") -> AlgoConfig:
    """Return the section `algo`; of a recipe of the user's own, which is imported, with the keys of its `args`.

    Raises ConfigError for a key or a value that the recipe does not take.
    """
    if isinstance(job.algo, AlgoConfig):
        return job.algo
    assert isinstance(job.recipe, Plugin)
    use, args = job.recipe.use, job.recipe.args
    try:
        return validated(declared_config(plugin.resolve(use), use), resolved(args, use) | job.algo)
    except ValidationError as exc:
        lines = [f"algo.{'.'.join(map(str, error['loc']))}  {error['msg']}" for error in exc.errors()]
        raise ConfigError("\n".join(lines)) from exc


def validated(config: type[AlgoConfig], values: dict[str, Any]) -> AlgoConfig:
    """Return a recipe's keys from plain values. Raises pydantic's ValidationError."""
    return config.model_validate_json(json.dumps(values), strict=True)
