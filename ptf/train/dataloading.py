"""What a run reads: its sources as partitions of packed sequences, how long that takes, and its validation sets."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ptf.compute.peers import peers
from ptf.compute.world import World
from ptf.config import Job
from ptf.config.rules import SCHEDULE_IS_LONGER, is_schedule_longer
from ptf.data.chat import FIELD
from ptf.data.document import PackUnit
from ptf.data.loader import Loader
from ptf.data.packing import pack_all
from ptf.data.partitions import Partitions, pack_units_once
from ptf.data.prompts import Prompts
from ptf.data.quarantine import Quarantine
from ptf.data.rank_balancing import group_size
from ptf.data.sources.rows import SourceSpec, specs
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import DataPlan, describe_order, is_cheap, plan_prompts, planned
from ptf.errors import UserError
from ptf.recipes.protocol import Recipe


def make_partitions(
    job: Job,
    recipe: Recipe,
    tokenizer: Tokenizer,
    run: Path | None = None,
    sources: Mapping[str, SourceSpec] | None = None,
) -> Partitions:
    """Build the partitions of `sources`, by default of the training data; `run` is the directory in which bad rows are
    collected."""
    data = job.data
    return Partitions(
        specs(data.sources, job.train.epochs, job.verify_bytes) if sources is None else sources,
        tokenizer,
        lambda row, source: recipe.encode(row, tokenizer, source),
        partitions=data.partitions,
        seed=job.seed,
        shuffle=data.shuffle_buffer,
        seq_len=data.seq_len,
        lookahead=data.packing_lookahead,
        too_long=data.too_long,
        temperature=data.mix.temperature,
        by=data.mix.by,
        exhausted=data.mix.exhausted,
        share_prefixes=data.share_prefixes,
        quarantine=str(run / "quarantine") if run and data.max_bad_rows_share else None,
        max_bad_rows_share=data.max_bad_rows_share,
        read_keys=read_keys(job, recipe),
    )


def make_prompts(job: Job, tokenizer: Tokenizer) -> Prompts:
    """Build the stream of the prompts of an online job."""
    return Prompts(
        specs(job.data.sources), tokenizer, job.seed, job.data.shuffle_buffer, temperature=job.data.mix.temperature
    )


def make_loader(job: Job, partitions: Partitions, world: World) -> Loader:
    """Build this rank's loader; all ranks call it together."""
    data = job.data
    if world.leads:
        for name in data.sources:
            if names := partitions.unread(name).names:
                print(f"train: source {name}: nothing reads {', '.join(names)}", flush=True)
    return Loader(
        partitions,
        partitions=data.partitions,
        sequences=job.train.global_batch_sequences,
        rank=world.data_rank,
        world_size=world.meshes.sizes.data,
        micro_batch_sequences=1 if job.train.deterministic else job.train.micro_batch_sequences,
        seq_len=data.seq_len,
        timeout_s=job.compute.timeout_s,
        peers=peers(world, group_size(world.meshes.sizes.data), job.compute.timeout_s),
    )


def planned_steps(job: Job, partitions: Partitions, loader: Loader, world: World) -> DataPlan:
    """Return the passes and steps of the whole run, over all ranks.

    The number of steps of a run that ends with its data is always exact. Raises UserError if there is nothing to train
    on, or if warm-up and decay do not fit into the run.
    """
    exact = is_cheap(partitions) or not partitions.mixture.endless
    if world.leads and exact:
        print("train: counting the steps and passes that the data has", flush=True)
    plan = planned(
        partitions,
        job.train.global_batch_sequences,
        job.train.steps,
        served=loader.served,
        total=lambda values: world.sum(values).tolist(),
        most=lambda end: float(world.max(end)),
        exact=exact,
    )
    if not plan.steps[1]:
        raise UserError("data.sources: the data has no sample to train on")
    _raise_if_schedule_is_longer(job, plan)
    return plan


def preview_data(job: Job, partitions: Partitions, few: int | None = None) -> tuple[DataPlan, dict[str, str]]:
    """Return the run's passes and steps, and the order in which each source is read, before training.

    Bad rows are left out. `few`: up to this number of rows, all rows are encoded, for exact numbers. Raise UserError if
    warm-up and decay do not fit into the run.
    """
    if job.rollout:
        assert job.train.steps is not None, "online jobs have no train.epochs"
        prompts = make_prompts(job, partitions.tokenizer)
        plan = plan_prompts(prompts, job.rollout.prompts_per_step, job.train.steps)
        return plan, {name: describe_order(ordered) for name, ordered in prompts.orders.items()}
    with tempfile.TemporaryDirectory() as aside:
        partitions = replace(partitions, quarantine=aside, max_bad_rows_share=1.0)
        plan = planned(partitions, job.train.global_batch_sequences, job.train.steps, exact=is_cheap(partitions, few))
    _raise_if_schedule_is_longer(job, plan)
    return plan, {name: describe_order(partitions.opened(name)[0]) for name in partitions.sources}


def _raise_if_schedule_is_longer(job: Job, plan: DataPlan) -> None:
    """Raise UserError if warm-up and decay are longer than the longest run that the data may give."""
    if is_schedule_longer(job.train, plan.steps[1]):
        raise UserError(f"{SCHEDULE_IS_LONGER} (it has {plan.steps[1]:,})")


def held_out_sequences(
    job: Job, recipe: Recipe, tokenizer: Tokenizer, quarantine: Path | None = None
) -> dict[str, list[list[PackUnit]]]:
    """Return the validation sets, packed.

    `quarantine`: the directory for bad rows, if these are skipped; without a directory they are only counted.
    """
    data = job.data
    sets: dict[str, list[list[PackUnit]]] = {}

    for name, spec in specs(data.validation, None, job.verify_bytes).items():
        file = quarantine / f"validation-{name}.jsonl" if quarantine else None
        units = pack_units_once(
            {name: spec},
            tokenizer=tokenizer,
            encode=lambda row, source: recipe.encode(row, tokenizer, source),
            seq_len=data.seq_len,
            too_long=data.too_long,
            set_aside=Quarantine(file, data.max_bad_rows_share).add if data.max_bad_rows_share else None,
        )
        sets[name] = pack_all(units, data.seq_len)
    return sets


def read_keys(job: Job, recipe: Recipe) -> tuple[str, ...]:
    """Return the keys of messages that the recipe reads beside those that every recipe does."""
    fields = (job.data.train_on.removeprefix(FIELD),) if job.data.train_on.startswith(FIELD) else ()
    return (*fields, "reward") if recipe.head == "scalar" else fields
