"""The algorithms by the name that a config gives them, and the recipe of a job. Adding one adds a package and a line here."""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ptf.config.section import Knobs, Plug

if TYPE_CHECKING:
    from ptf.config.schema import Job
    from ptf.recipes.protocol import Recipe


class Entry(NamedTuple):
    """Where an algorithm is: `knobs.py` and `recipe.py` of `package`, whose classes are `NAMEKnobs` and `NAME`."""

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


FACTS = ("train_on", "sources", "how", "length")  # of a job, which recipes may ask for by a parameter's name: see `facts`


@cache
def knobs_of(recipe: str) -> type[Knobs]:
    """The section `algo` of an algorithm; imports no torch. Raises KeyError for a name that is not there."""
    package, name = RECIPES[recipe]
    return getattr(importlib.import_module(f"{package}.knobs"), f"{name}Knobs")


def build(job: "Job") -> "Recipe":
    """The recipe of a job: its class, called with the knobs of `algo` (a plugin also with its `args`) and with those facts of the job that it has
    parameters for (`facts`), which are the same for algorithms of ptf and of others."""
    if isinstance(job.recipe, Plug):
        from ptf.config import plug

        made: Callable[..., Any] = plug.bind(job.recipe)
        given: dict[str, Any] = cast("dict[str, Any]", job.algo)
    else:
        package, name = RECIPES[job.recipe]
        made = getattr(importlib.import_module(f"{package}.recipe"), name)
        given = cast(Knobs, job.algo).arguments()
    taken = inspect.signature(made).parameters
    fixed = made.keywords if isinstance(job.recipe, Plug) else {}  # type: ignore[attr-defined]
    told = {name: value for name, value in facts(job).items() if name in taken and name not in fixed}
    return made(**(told | given))


def facts(job: "Job") -> dict[str, Any]:
    """What a recipe may ask for by a parameter's name: `train_on` (what of a chat is trained), `sources` (names of the training data) and, where
    there are rollouts, `how` (the distribution that tokens are drawn from) and `length` (the largest number of tokens of one answer)."""
    found: dict[str, Any] = {"train_on": job.data.train_on, "sources": tuple(job.data.sources)}
    if job.rollout is not None:
        from ptf.model.sampling import Processing

        found |= {"how": Processing(job.rollout.temperature, job.rollout.top_p), "length": job.rollout.max_new_tokens}
    return found
