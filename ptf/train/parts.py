"""What an offline training run is made of, on one rank, and how it is assembled."""

from functools import partial
from pathlib import Path

from ptf.compute import provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.saver import BackgroundWriter, Saver
from ptf.compute.world import World, alone
from ptf.config import Job
from ptf.data.sources.rows import fingerprints, first_lines, specs
from ptf.model import model_files
from ptf.model.model import Model
from ptf.recipes import registry
from ptf.train.dataloading import held_out_sequences, make_loader, make_partitions
from ptf.train.deterministic import DeterministicTrainer
from ptf.train.export_settings import classifier_config
from ptf.train.model_source import StartingModel, load_frozen_models
from ptf.train.precompute import precompute_sources
from ptf.train.trainer import Trainer


class Parts:
    """The parts of a run."""

    def __init__(self, job: Job, world: World, run: Path, lease: Lease) -> None:
        """Load the models, open the data, and find the checkpoints; every rank calls it."""
        self.job, self.world, self.run, self.lease = job, world, run, lease
        self.recipe = recipe = registry.build(job)
        # every rank downloads the model to its own machine; the leading rank's directories are those of all
        located = model_files.locate(job.model.path, verify_up_to=job.verify_bytes)
        start = world.together(lambda: StartingModel.of_job(job, run, located))
        self.tokenizer = tokenizer = start.load_tokenizer()
        if world.leads and (trap := tokenizer.class_mismatch()):
            print(f"train: {trap}", flush=True)
        if recipe.head == "scalar":  # raises before training what an export would
            classifier_config(start.directory, tokenizer)
        # what the model is loaded from: adapters, to be of use, need a model with weights
        self.source = source = world.together(start.with_weights) if job.model.lora else start
        # the ranks that share one model
        self.model_world = shared = alone(world) if job.train.deterministic else world
        self.model = model = source.load(shared, job.train, recipe.head)
        load_frozen = partial(load_frozen_models, job=job, start=source, model=model, world=world, model_world=shared)
        data_job, self.frozen_models = job, dict[str, Model]()
        if recipe.precompute:  # the sources are then replaced by precomputed ones
            data_job = precompute_sources(job, recipe, tokenizer, world, model, source.directory, load_frozen)
        else:
            self.frozen_models = load_frozen(recipe.frozen_models)
        trainer_class = DeterministicTrainer if job.train.deterministic else Trainer
        self.trainer = trainer_class(model, world, job.train, self.frozen_models)
        self.partitions = make_partitions(data_job, recipe, tokenizer, run)
        self.loader = make_loader(data_job, self.partitions, world)
        self.held_out = held_out_sequences(data_job, recipe, tokenizer, run / "quarantine" if world.leads else None)
        self.saves = Checkpoints.of(job, run, lease)
        self.saver = Saver(self.saves, BackgroundWriter(world, job.compute.timeout_s))
        if world.leads:
            print("\n".join(first_lines(specs(data_job.data.sources))), flush=True)
        data, packages = fingerprints(specs(job.data.sources)) if world.leads else {}, model.kernels.packages
        self.made_with = world.together(
            lambda: provenance.made_with(world.device, data, tokenizer.identity["fingerprint"], packages)
        )
