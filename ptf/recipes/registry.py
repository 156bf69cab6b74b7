"""The recipe of a job, built from its config (ptf.config.recipes lists those of ptf)."""

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ptf.config import plugin
from ptf.config.inherited import algo_config
from ptf.config.logprob_limits import logprob_limits
from ptf.config.recipes import RECIPES, STALENESS_NEEDS_CAP, algo_config_of
from ptf.config.section import Plugin

if TYPE_CHECKING:
    from ptf.config.schema import Job
    from ptf.recipes.protocol import Recipe


def build(job: "Job") -> "Recipe":
    """Build the recipe of a job.

    Its class is called with the keys of `algo` (a plugin also with its `args`) and with those values of `job_arguments`
    that it has parameters for. A plugin that inherits from a recipe of ptf is called with all keys of that recipe, as
    the recipe itself is: with their defaults, and `auto` replaced by what it is for the job.
    """
    settings = algo_config(job).in_force(job).arguments()
    if isinstance(job.recipe, Plugin):
        recipe: Callable[..., Any] = plugin.bind(job.recipe)
        parameters, bound = inspect.signature(recipe).parameters, recipe.keywords  # type: ignore[attr-defined]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        inherited = {name: value for name, value in settings.items() if takes_any or name in parameters}
        settings = cast("dict[str, Any]", job.algo) | inherited
    else:
        package, name = RECIPES[job.recipe]
        recipe = getattr(importlib.import_module(f"{package}.recipe"), name)
        parameters, bound = inspect.signature(recipe).parameters, {}
    requested = {name: value for name, value in job_arguments(job).items() if name in parameters and name not in bound}
    made = recipe(**(requested | settings))
    _raise_if_incomplete(made, job)
    return made


def is_online(job: "Job") -> bool:
    """Return whether a job's recipe trains on what it generates; torch is imported for a plugin only."""
    return build(job).online if isinstance(job.recipe, Plugin) else algo_config_of(job.recipe).online


def _raise_if_incomplete(made: Any, job: "Job") -> None:
    """Raise UserError for a recipe without `denominator` or `online`, or whose `online` is not that of its config."""
    from ptf.errors import UserError

    name = f"the recipe {type(made).__name__}"
    if not hasattr(made, "denominator"):
        raise UserError(f"{name} has no method `denominator(batch)`")
    if not hasattr(made, "online"):
        raise UserError(f"{name} has no `online`: True if it trains on rollouts, else False")
    if job.rollout is not None and job.rollout.max_staleness and getattr(made, "tis_cap", None) is None:
        raise UserError(f"algo.tis_cap: {STALENESS_NEEDS_CAP}; {name} has no `tis_cap`")
    if not isinstance(job.recipe, Plugin) and made.online != (declared := algo_config_of(job.recipe).online):
        raise UserError(f"{name} has `online` {made.online}, and its config class has {declared}; they must agree")


def job_arguments(job: "Job") -> dict[str, Any]:
    """Return the values of the job that a recipe may request by a parameter's name.

    They are `train_on` (which messages of a chat are trained) and `sources` (the names of the training data). Where
    there are rollouts, they are also `processing` (the distribution that tokens are drawn from),
    `max_new_tokens` (the largest number of tokens of one response) and `logprob_diff_threshold` (tokens whose log-probs
    in engine and trainer differ by more are counted).
    """
    values: dict[str, Any] = {"train_on": job.data.train_on, "sources": tuple(job.data.sources)}
    if job.rollout is not None:
        from ptf.model.sampling import LogitsProcessing

        values |= {
            "processing": LogitsProcessing(job.rollout.temperature, job.rollout.top_p),
            "max_new_tokens": job.rollout.max_new_tokens,
            "logprob_diff_threshold": logprob_limits(job).threshold,
        }
    return values
