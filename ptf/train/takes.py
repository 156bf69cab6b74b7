"""What the run of a job takes of its data, for those who look at it before it is trained."""

import tempfile
from dataclasses import replace

from ptf.config import Job
from ptf.data.passes import Planned, is_few, of_prompts, order_of, planned
from ptf.data.pipeline import prompts_stream
from ptf.data.tokenizer import Tokenizer
from ptf.recipes import Recipe
from ptf.train.reading import make_lanes, specs


def takes(job: Job, recipe: Recipe, tokenizer: Tokenizer, few: int | None = None) -> tuple[Planned, dict[str, str]]:
    """Passes and steps, and in which order each source is read. Rows that are bad are left out. `few`: rows that are encoded for exact numbers."""
    if job.rollout:
        assert job.train.steps is not None, "online jobs have no train.epochs"
        prompts = prompts_stream(specs(job.data.sources), tokenizer=tokenizer, seed=job.seed, shuffle=job.data.shuffle, temperature=job.data.mix.temperature)
        return of_prompts(prompts, job.rollout.prompts, job.train.steps), {name: order_of(ordered) for name, ordered in prompts.orders.items()}
    with tempfile.TemporaryDirectory() as aside:
        lanes = replace(make_lanes(job, recipe, tokenizer), quarantine=aside, max_bad=1.0)
        return planned(lanes, job.train.rows, job.train.steps, exact=is_few(lanes, few)), {name: order_of(lanes.opened(name)[0]) for name in lanes.sources}
