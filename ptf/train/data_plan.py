"""A preview of how a run reads its data, for commands that show it before training."""

import tempfile
from dataclasses import replace

from ptf.config import Job
from ptf.config.rules import schedule_fault
from ptf.data.prompts import prompts_stream
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import DataPlan, describe_order, is_cheap, plan_prompts, planned
from ptf.errors import UserError
from ptf.recipes.protocol import Recipe
from ptf.train.dataloading import make_partitions
from ptf.train.source_specs import specs


def raise_if_schedule_is_longer(job: Job, plan: DataPlan) -> None:
    """Raise UserError if warm-up and decay are longer than the longest run that the data may give."""
    if fault := schedule_fault(job.train, plan.steps[1]):
        raise UserError(f"{fault} (it has {plan.steps[1]:,})")


def preview_data(
    job: Job, recipe: Recipe, tokenizer: Tokenizer, few: int | None = None
) -> tuple[DataPlan, dict[str, str]]:
    """Return the run's passes and steps, and the order in which each source is read.

    Bad rows are left out. `few`: up to this number of rows, all rows are encoded, for exact numbers. Raise UserError if
    warm-up and decay do not fit into the run.
    """
    if job.rollout:
        assert job.train.steps is not None, "online jobs have no train.epochs"
        prompts = prompts_stream(
            specs(job.data.sources),
            tokenizer=tokenizer,
            seed=job.seed,
            shuffle=job.data.shuffle_buffer,
            temperature=job.data.mix.temperature,
        )
        return plan_prompts(prompts, job.rollout.prompts_per_step, job.train.steps), {
            name: describe_order(ordered) for name, ordered in prompts.orders.items()
        }
    with tempfile.TemporaryDirectory() as aside:
        partitions = replace(make_partitions(job, recipe, tokenizer), quarantine=aside, max_bad_rows_share=1.0)
        plan = planned(partitions, job.train.global_batch_sequences, job.train.steps, exact=is_cheap(partitions, few))
        raise_if_schedule_is_longer(job, plan)
        return plan, {name: describe_order(partitions.opened(name)[0]) for name in partitions.sources}
