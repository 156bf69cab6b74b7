"""What an offline training run is made of, on one rank, and how it is assembled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ptf.compute import provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.saver import Saver
from ptf.compute.world import World, alone
from ptf.config import Job
from ptf.data.document import PackUnit
from ptf.data.loader import Loader
from ptf.data.partitions import Partitions
from ptf.data.sources.rows import fingerprints, first_lines
from ptf.data.tokenizer import Tokenizer
from ptf.model.model import Model
from ptf.recipes import registry
from ptf.recipes.protocol import Recipe
from ptf.train.dataloading import held_out_sequences, make_loader, make_partitions
from ptf.train.deterministic import trainer_of
from ptf.train.export_settings import classifier_config
from ptf.train.model_source import StartingModel, load_frozen_models
from ptf.train.precompute import precompute_sources
from ptf.train.source_specs import specs
from ptf.train.trainer import Trainer


@dataclass(frozen=True)
class Parts:
    """The parts of a run."""

    job: Job
    world: World
    run: Path
    lease: Lease
    recipe: Recipe
    source: StartingModel  # what `model` was loaded from
    tokenizer: Tokenizer
    model: Model
    model_world: World  # the ranks that share one model
    frozen_models: Mapping[str, Model]
    trainer: Trainer
    partitions: Partitions
    loader: Loader
    held_out: Mapping[str, Sequence[Sequence[PackUnit]]]
    saves: Checkpoints
    saver: Saver
    made_with: dict[str, Any]


def build(job: Job, world: World, run: Path, lease: Lease) -> Parts:
    """Load the models, open the data, and find the checkpoints; every rank calls it."""
    recipe = registry.build(job)
    start = StartingModel.of_job(job, run, world)
    tokenizer = start.load_tokenizer()
    if world.leads and (trap := tokenizer.class_mismatch()):
        print(f"train: {trap}", flush=True)
    if recipe.head == "scalar":  # raises before training what an export would
        classifier_config(start.directory, tokenizer)
    # adapters, to be of use, need a model with weights
    source = world.together(start.with_weights) if job.model.lora else start
    model_world = alone(world) if job.train.deterministic else world
    model = source.load(model_world, job.train, recipe.head)
    load_frozen = partial(load_frozen_models, job=job, start=source, model=model, world=world, model_world=model_world)
    if recipe.precompute:  # the sources are then replaced by precomputed ones
        data_job = precompute_sources(job, recipe, tokenizer, world, model, source.directory, load_frozen)
        frozen_models = {}
    else:
        data_job, frozen_models = job, load_frozen(recipe.frozen_models)
    trainer = trainer_of(job.train, model, world, frozen_models)
    partitions = make_partitions(data_job, recipe, tokenizer, run)
    loader = make_loader(data_job, partitions, world)
    held_out = held_out_sequences(data_job, recipe, tokenizer, run / "quarantine" if world.leads else None)
    saves = Checkpoints.of(job, run, lease)
    saver = Saver(saves, world, job.compute.timeout_s)
    if world.leads:
        print("\n".join(first_lines(specs(data_job.data.sources))), flush=True)
    data = fingerprints(specs(job.data.sources)) if world.leads else {}
    packages = model.kernels.packages
    made_with = world.together(lambda: provenance.made_with(world.device, data, tokenizer.fingerprint(), packages))
    return Parts(
        job,
        world,
        run,
        lease,
        recipe,
        source,
        tokenizer,
        model,
        model_world,
        frozen_models,
        trainer,
        partitions,
        loader,
        held_out,
        saves,
        saver,
        made_with,
    )
