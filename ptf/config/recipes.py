"""The recipes of ptf by the name that a config gives them, and the classes of their section `algo`; without torch.

Adding a recipe to ptf adds a package, a line here, and flows/NAME_flow.py; a plugin recipe needs none of these.
"""

import importlib
from functools import cache
from typing import NamedTuple

from ptf.config.section import AlgoConfig


class Entry(NamedTuple):
    """The location of a recipe: `config.py` and `recipe.py` of `package`, with the classes `NAMEConfig` and
    `NAME`."""

    package: str
    name: str


RECIPES = {
    "sft": Entry("ptf.recipes.sft", "SFT"),
    "dpo": Entry("ptf.recipes.dpo", "DPO"),
    "kd": Entry("ptf.recipes.kd", "KD"),
    "rm": Entry("ptf.recipes.rm", "RM"),
    "grpo": Entry("ptf.recipes.grpo", "GRPO"),
    "ppo": Entry("ptf.recipes.ppo", "PPO"),
    "opd": Entry("ptf.recipes.opd", "OPD"),
}

STALENESS_NEEDS_CAP = (
    "with rollout.max_staleness responses have tokens of earlier weights, and the loss must be corrected for it; give "
    "a cap (2 is usual)"
)
# Values of a job that recipes may request by a parameter's name; see `job_arguments`.
JOB_ARGUMENTS = ("train_on", "sources", "processing", "max_new_tokens", "logprob_diff_threshold")


@cache
def algo_config_of(recipe: str) -> type[AlgoConfig]:
    """Return the class of an algorithm's section `algo`; it imports no torch. Raises KeyError for an unknown name."""
    package, name = RECIPES[recipe]
    return getattr(importlib.import_module(f"{package}.config"), f"{name}Config")


def recipe_of_class(recipe: type) -> str | None:
    """Return the name of the recipe of ptf whose class this is; None if it is no recipe of ptf."""
    modules = {(f"{package}.recipe", class_name): name for name, (package, class_name) in RECIPES.items()}
    return modules.get((recipe.__module__, recipe.__name__))
