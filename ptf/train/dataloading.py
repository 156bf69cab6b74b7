"""What a run reads: its sources as partitions of packed sequences, and its validation sets."""

from collections.abc import Sequence
from pathlib import Path

from ptf.compute.peers import peers
from ptf.compute.world import World
from ptf.config import Job
from ptf.data.chat import FIELD
from ptf.data.forms import Row
from ptf.data.loader import Loader
from ptf.data.packing import pack_all
from ptf.data.partitions import Partitions
from ptf.data.quarantine import Quarantine
from ptf.data.rank_balancing import group_size
from ptf.data.sample import PackUnit
from ptf.data.source_units import pack_units_once
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import DataPlan, is_cheap, planned
from ptf.errors import UserError
from ptf.recipes.protocol import Recipe
from ptf.train.source_specs import specs


def make_partitions(job: Job, recipe: Recipe, tokenizer: Tokenizer, run: Path | None = None) -> Partitions:
    """Build the partitions of the training data; `run` is the directory in which bad rows are collected."""
    data = job.data
    return Partitions(
        specs(data.sources, job.train.epochs, job.verify_bytes),
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
        reorder=data.baskets == "shuffle",
        share_prefixes=data.share_prefixes,
        quarantine=str(run / "quarantine") if run and data.on_bad_row == "skip" else None,
        max_bad_rows_share=data.max_bad_rows_share,
        read_keys=read_keys(job, recipe),
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
        world_size=world.data_parallel_size,
        micro_batch_sequences=1 if job.train.deterministic else job.train.micro_batch_sequences,
        seq_len=data.seq_len,
        timeout_s=job.compute.timeout_s,
        peers=peers(world, group_size(world.data_parallel_size), job.compute.timeout_s),
        pinned=world.device.type == "cuda",
    )


def planned_steps(job: Job, partitions: Partitions, loader: Loader, world: World) -> DataPlan:
    """Return the passes and steps of the whole run, over all ranks.

    The number of steps of a run that ends with its data is always exact. Raises UserError if there is nothing to train
    on.
    """
    few = is_cheap(partitions)
    if world.leads and (few or not partitions.endless):
        print("train: counting the steps and passes that the data has", flush=True)

    def total(values: Sequence[float]) -> list[float]:
        return world.sum(values).tolist()

    plan = planned(
        partitions,
        job.train.global_batch_sequences,
        job.train.steps,
        served=loader.served,
        total=total,
        most=world.max,
        exact=few or not partitions.endless,
    )
    if not plan.steps[1]:
        raise UserError("data.sources: the data has no sample to train on")
    return plan


def held_out_sequences(
    job: Job, recipe: Recipe, tokenizer: Tokenizer, quarantine: Path | None = None
) -> dict[str, list[list[PackUnit]]]:
    """Return the validation sets, packed.

    `quarantine`: the directory for bad rows, if these are skipped; without a directory they are only counted.
    """
    data = job.data
    sets: dict[str, list[list[PackUnit]]] = {}

    def encode(row: Row, source: str) -> list[PackUnit]:
        return recipe.encode(row, tokenizer, source)

    for name, spec in specs(data.validation, None, job.verify_bytes).items():
        file = quarantine / f"validation-{name}.jsonl" if quarantine else None
        set_aside = Quarantine(file, data.max_bad_rows_share).add if data.on_bad_row == "skip" else None
        units = pack_units_once(
            {name: spec},
            tokenizer=tokenizer,
            encode=encode,
            seq_len=data.seq_len,
            too_long=data.too_long,
            set_aside=set_aside,
        )
        sets[name] = pack_all(units, data.seq_len)
    return sets


def read_keys(job: Job, recipe: Recipe) -> tuple[str, ...]:
    """Return the keys of messages that the recipe reads beside those that every recipe does."""
    fields = (job.data.train_on.removeprefix(FIELD),) if job.data.train_on.startswith(FIELD) else ()
    return (*fields, "reward") if recipe.head == "scalar" else fields
