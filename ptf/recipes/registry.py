"""The recipe of a job, built from its config (ptf.config.recipes lists those of ptf)."""

import importlib
from typing import TYPE_CHECKING

from ptf.config import plugin
from ptf.config.recipes import STALENESS_NEEDS_CAP, algo_config
from ptf.config.section import Plugin
from ptf.errors import UserError

if TYPE_CHECKING:
    from ptf.config.schema import Job
    from ptf.recipes.protocol import Recipe


def build(job: "Job") -> "Recipe":
    """Build the recipe of a job from its keys, in which `auto` is replaced by what it is for the job, and from what
    recipes read of the rest of the job."""
    from ptf.config.logprob_limits import logprob_limits
    from ptf.model.sampling import LogitsProcessing
    from ptf.recipes.protocol import Context

    config = algo_config(job).in_force(job)
    if isinstance(job.recipe, Plugin):
        made = plugin.resolve(job.recipe.use)
        if job.rollout is not None and not config.online:
            raise UserError(
                f"{job.recipe.use} does not train on rollouts: remove the section rollout, or give the class of its "
                "keys `online: ClassVar[bool] = True`"
            )
    else:
        made = getattr(importlib.import_module(f"ptf.recipes.{job.recipe}.recipe"), job.recipe.upper())
    if job.rollout is not None and job.rollout.max_staleness and getattr(config, "tis_cap", None) is None:
        raise UserError(f"algo.tis_cap: {STALENESS_NEEDS_CAP}; the recipe {made.__name__} has no `tis_cap`")
    sampled = {}
    if (rollout := job.rollout) is not None:
        sampled = {
            "processing": LogitsProcessing(rollout.temperature, rollout.top_p),
            "max_new_tokens": rollout.max_new_tokens,
            "logprob_diff_threshold": logprob_limits(job).threshold,
        }
    return made(config, Context(job.data.train_on, tuple(job.data.sources), **sampled))
