"""The offline training loop; every rank runs the same program."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from ptf.compute import checkpoint, provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.meter import peak_flops, peak_memory_gib
from ptf.compute.saver import Saver
from ptf.compute.shutdown import StopSignal, on_sigterm
from ptf.compute.tracking import Tracker
from ptf.compute.world import World, alone
from ptf.config import Job, dump
from ptf.data.batch import Batch
from ptf.data.partitions import Partitions
from ptf.data.sources.rows import fingerprints, first_lines
from ptf.data.training_length import DataPlan
from ptf.errors import Stopped, UserError
from ptf.model.decoder import Decoder
from ptf.model.flops import Flops
from ptf.model.fused import attention_of
from ptf.model.sharding import compilation
from ptf.recipes import registry
from ptf.recipes.protocol import FrozenModelSpec
from ptf.train import nonfinite
from ptf.train.adapter import export_adapter
from ptf.train.dataloading import held_out_sequences, make_loader, make_partitions, planned_steps
from ptf.train.deterministic import trainer_of
from ptf.train.early_stopping import EarlyStopping
from ptf.train.export import MODEL, export
from ptf.train.export_settings import classifier_config
from ptf.train.frozen_models import forward_flops, load_frozen_models
from ptf.train.load_comparison import compare_with_transformers
from ptf.train.optim import Schedule
from ptf.train.precompute import precompute_sources
from ptf.train.resume import raise_if_fixed_keys_changed
from ptf.train.source_specs import specs
from ptf.train.starting_model import StartingModel
from ptf.train.trainer import load_model
from ptf.train.validate import held_out_metrics
from ptf.train.warm_up import in_passes, warm_up
from ptf.workspace import progress


def train_offline(job: Job, world: World, run: Path, lease: Lease) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one.

    Writes `run/model`, a Hugging Face directory, and with LoRA `run/adapter`. Raises Stopped if the run was stopped on
    request before its end, and LeaseLost if a different process has taken over the run.
    """
    with progress.stage("train") if world.leads else nullcontext():
        try:
            with world.clock.phase("loading"):
                attempt = OfflineAttempt(job, world, run, lease)
            try:
                with on_sigterm(attempt.stop_signal.set):
                    attempt.train()
            finally:
                attempt.close()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(job, error) from error
        with world.clock.phase("export"):
            attempt.export()


class OfflineAttempt:
    """One attempt at a run, on one rank."""

    def __init__(self, job: Job, world: World, run: Path, lease: Lease) -> None:
        self.job, self.world, self.run, self.lease = job, world, run, lease
        self.recipe = registry.build(job)
        self._load_model()
        data_job = self._prepare_frozen_models()
        self.trainer = trainer_of(job.train, self.model, world, self.frozen_models)
        self.trainer.raise_if_large(job.train.global_batch_sequences)
        partitions = make_partitions(data_job, self.recipe, self.tokenizer, run)
        self.loader = make_loader(data_job, partitions, world)
        self.held_out = held_out_sequences(
            data_job, self.recipe, self.tokenizer, run / "quarantine" if world.leads else None
        )
        self.saves = Checkpoints.of(job, run, lease)
        self.saver = Saver(self.saves, world, job.compute.timeout_s)
        self.early_stopping = early_stopping_of(job)
        self.stop_signal = StopSignal(run)
        if world.leads:
            print("\n".join(first_lines(specs(data_job.data.sources))), flush=True)
        data = fingerprints(specs(job.data.sources)) if world.leads else {}
        self.made_with = world.together(
            lambda: provenance.made_with(world.device, data, self.tokenizer.fingerprint(), self.model.kernels)
        )
        self.flops = [Flops.of(self.model), *map(forward_flops, self.frozen_models.values())]
        self.peak = self.measured_peak()
        self.clock = world.clock
        self._begin(partitions)

    def _load_model(self) -> None:
        """Load the tokenizer and the model that is trained."""
        job, world, run = self.job, self.world, self.run
        starting = StartingModel.of(job, run, world)
        self.tokenizer, self.tokenizer_path = starting.load_tokenizer(), starting.tokenizer_path
        if world.leads and (trap := self.tokenizer.class_mismatch()):
            print(f"train: {trap}", flush=True)
        if self.recipe.head == "scalar":  # raises before training what an export would
            classifier_config(starting.directory, self.tokenizer)
        starting = world.together(starting.adapter_base)
        self.spec, self.directory = starting.section, starting.directory
        self.model_world = alone(world) if job.train.deterministic else world  # the ranks that share one model
        self.model, self.family = load_model(
            self.directory,
            self.model_world,
            self.spec,
            seed=job.seed,
            precision=job.train.precision,
            head=self.recipe.head,
            recomputed=job.train.activation_checkpointing,
            compiled=job.train.compile,
            fused=job.train.fused,
        )

    def _prepare_frozen_models(self) -> Job:
        """Load the frozen models that the recipe needs, or precompute their outputs.

        Returns the job whose data is read: with precomputed data, its sources are the precomputed ones.
        """
        self.frozen_models: dict[str, Decoder] = {}
        if getattr(self.recipe, "precompute", False):
            recipe: Any = self.recipe
            return precompute_sources(
                self.job, recipe, self.tokenizer, self.world, self.model, self.directory, self.load_by_role
            )
        self.frozen_models = self.load_by_role(self.recipe.frozen_models)
        return self.job

    def _begin(self, partitions: Partitions) -> None:
        """Restore the newest checkpoint or plan the run from step 0; then set its end, schedule and tracker."""
        job, world, run, lease = self.job, self.world, self.run, self.lease
        restored = self.restore()
        plan = None if restored else planned_steps(job, partitions, self.loader, world)
        self.step, ends, rows = restored or (0, cast("DataPlan", plan).steps[1], None)
        announce(job, world, self.model, ends, plan)
        self.planned = ends
        self.track: Tracker | None = None
        # warm-up and decay are shares of the configured run; its end may have been moved nearer before this resume
        self.trainer.schedule = Schedule.of(job.train, job.train.steps or ends)
        self.end_at(ends)
        if world.leads:
            self.track = Tracker(run, job.track, resumed=self.step, steps=ends, lease=lease, expected=rows)
        self._warm_up()
        self.said = set[str]()
        self.skipped = 0  # number of consecutive skipped steps
        self.clock.step = self.step

    def _warm_up(self) -> None:
        """Compile for the batches of the run before the first step."""
        job, world = self.job, self.world
        most = job.train.micro_batch_sequences
        trained = in_passes(job.train.global_batch_sequences // world.data_parallel_size, most)
        validated = {most} if job.train.validate_every and job.data.validation else set[int]()
        frozen_models = list(self.frozen_models.values())
        scored = validated | (trained if self.model in frozen_models else set())  # without its adapters
        shares = job.data.share_prefixes
        warm_up(self.model, world, job.data.seq_len, trained=trained, scored=scored, share_prefixes=shares)
        for frozen_model in frozen_models:
            if frozen_model is not self.model:
                warm_up(frozen_model, world, job.data.seq_len, scored=validated | trained)

    def load_by_role(self, by_role: Mapping[str, FrozenModelSpec]) -> dict[str, Decoder]:
        """Load frozen models by role."""
        return load_frozen_models(
            by_role,
            self.job,
            self.world,
            self.model_world,
            self.model,
            self.spec,
            self.directory,
            self.run,
            self.tokenizer_path,
        )

    def end_at(self, ends: int) -> None:
        """Set the number of steps after which the run ends."""
        self.ends = self.saves.steps = ends
        self.trainer.schedule = replace(self.trainer.schedule, steps=ends)
        if self.track:
            self.track.steps = ends

    def train(self) -> None:
        """Run the loop: step, validate, log, checkpoint. Raises Stopped if the run stops on request before its end."""
        checkpoint_wait = 0.0
        validate_every = self.job.train.validate_every if self.job.data.validation else None
        self.clock.take()  # discard the seconds of loading
        while self.step < self.ends:
            metrics, is_stopping = self.one_step()
            step = self.step + 1
            if validate_every and (step % validate_every == 0 or step == self.ends):
                with self.clock.phase("validate"):
                    metrics |= self.validate()
            self.step = self.clock.step = step
            seconds = self.clock.take()
            if self.track:
                self.track.log(self.step, metrics | {"checkpoint_wait_s": checkpoint_wait} | seconds)
            checkpoint_wait = 0.0
            if self.saves.due(self.step) or is_stopping:
                with self.clock.phase("checkpoint"):
                    checkpoint_wait = self.save(metrics)
            if is_stopping and self.step < self.ends:
                self.wait_for_checkpoint()
                raise Stopped(self.step, self.ends, self.saves.path(self.step))
        self.wait_for_checkpoint()

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written."""
        with self.clock.phase("last_checkpoint"):
            self.saver.wait()

    def one_step(self) -> tuple[dict[str, float], bool]:
        """Train one step; return its metrics, and whether any rank has a request to stop."""
        began = time.perf_counter()
        with self.clock.phase("data"):
            micro = next(self.loader)
        if self.step == 0:
            with self.clock.phase("loading"):
                row = self.world.together(lambda: first_document(micro[0]) if micro else [])
                precision = self.job.train.precision
                compare_with_transformers(self.model, self.directory, self.spec, row, self.world, precision)
            began = time.perf_counter()
        self.world.seed(self.job.seed, self.step)
        try:
            metrics, self.skipped = self.trainer.step(micro, self.recipe, self.step, self.loader.numbers), 0
        except FloatingPointError as error:
            metrics = self.skip_step(error, micro)
        with self.clock.phase("metrics"):
            return self.with_measurements(metrics, micro, began)

    def with_measurements(
        self, metrics: dict[str, float], micro: Sequence[Batch], began: float
    ) -> tuple[dict[str, float], bool]:
        """Add the step's token counts, speed and memory, over all ranks; also return whether any rank has a request to
        stop."""
        job, world = self.job, self.world
        lengths = [n for batch in micro for n in batch.lengths]
        prefix_lengths = [n for batch in micro for n in batch.prefix_lengths]
        targets = sum(len(batch.trained_positions) for batch in micro)
        slots = sum(batch.tokens.numel() for batch in micro)
        tokens, work, slots = world.sum(
            [sum(lengths), sum(flops.step(lengths, targets, prefix_lengths) for flops in self.flops), slots]
        ).tolist()
        metrics |= {"tokens": tokens, "packing_efficiency": tokens / slots}
        for name in job.data.sources:
            if share := metrics.get(f"source_share/{name}"):
                metrics[f"source_loss/{name}"] /= share
            else:  # the source is the only one, or has no documents in this step
                metrics.pop(f"source_loss/{name}", None)
        reported = [names for names, applies in COUNTED.items() if applies(job)]
        without_samples, rows, *counts = world.sum(
            [self.loader.counts[name] for name in ("rows_without_samples", "rows", *(count for _, count in reported))]
        ).tolist()
        metrics["unused_rows_share"] = without_samples / max(1.0, rows)
        metrics |= dict(zip((metric for metric, _ in reported), counts, strict=True))
        spent = time.perf_counter() - began
        # the maxima are over all ranks, including those of one tensor-parallel group
        stopping, peak_memory, longest = world.maxima(
            float(self.stop_signal.is_set), peak_memory_gib(world.device), float(max(lengths, default=0))
        )
        if text := self.model.config.beyond(int(longest)):
            self.say_once("a document of", text)
        metrics |= {"tokens_per_s": tokens / spent, **self.mfu(work / spent), "peak_memory_gib": peak_memory}
        return metrics | {"data_wait_s": self.loader.waited_s, "step_s": spent}, stopping > 0

    def say_once(self, what: str, rest: str) -> None:
        """Print a line that begins with `what`, once."""
        if self.world.leads and what not in self.said:
            self.said.add(what)
            print(f"train: {what} {rest}", flush=True)

    def measured_peak(self) -> float:
        """Return the FLOP/s that all ranks reach at most."""
        return peak_flops(self.world.device, self.job.train.precision) * self.world.size

    def mfu(self, rate: float) -> dict[str, float]:
        """Return the share of the peak that so many FLOP/s are. If it is above 1, the peak is measured again, because
        others may have used the CPU meanwhile; if it still is, that is an error of ptf's, which is said once."""
        if rate > self.peak:
            self.peak = max(self.peak, self.measured_peak())
        if rate <= self.peak:
            return {"mfu": rate / self.peak}
        self.say_once("mfu", f"is left out: {rate / self.peak:.3f} is above 1, an error of ptf's; please report it")
        return {}

    def skip_step(self, error: FloatingPointError, micro: Sequence[Batch]) -> dict[str, float]:
        """Write the documents of a step whose loss or gradient was not finite, and return its metrics.

        Raises UserError if `train.on_nonfinite` is `stop`, or after too many consecutive steps.
        """
        self.skipped += 1
        directory = nonfinite.write_documents(self.run, self.step + 1, micro, self.tokenizer, self.world)
        if self.job.train.on_nonfinite == "stop" or self.skipped >= nonfinite.MOST:
            repeats = f", {self.skipped} times in a row" if self.skipped > 1 else ""
            advice = (
                "continue this run with train.on_nonfinite: skip, or start one with a lower train.lr or "
                "train.max_grad_norm"
            )
            raise UserError(f"{error}{repeats}. The documents of this step are in {directory}; {advice}") from error
        if self.world.leads:
            print(f"{error}; the step is skipped. Its documents are in {directory}", flush=True)
        return {"nonfinite_step_skipped": 1.0}

    def validate(self) -> dict[str, float]:
        """Measure the held-out losses. Early stopping and `train.lr_decay_at_loss` may move the end of the run
        nearer."""
        train = self.job.train
        micro_batch_sequences = 1 if train.deterministic else train.micro_batch_sequences
        losses = held_out_metrics(
            self.model,
            self.recipe,
            self.held_out,
            self.model_world,
            micro_batch_sequences,
            self.job.data.seq_len,
            self.frozen_models,
        )
        if (
            self.ends == self.planned
            and train.lr_decay_at_loss
            and losses[f"loss/{next(iter(self.held_out))}"] <= train.lr_decay_at_loss
        ):
            self.end_at(min(self.ends, self.step + 1 + (self.trainer.schedule.decay or 0)))
        if self.early_stopping and self.early_stopping(losses):
            self.end_at(self.step + 1)
            if self.world.leads:
                print(
                    f"train: {self.early_stopping.metric} has not improved {train.early_stopping} times in a row: "
                    "training stops now",
                    flush=True,
                )
        return losses

    def restore(self) -> tuple[int, int, dict[str, Any] | None] | None:
        """Continue from the newest checkpoint that verifies.

        Returns the number of finished steps, the step at which the run ends, and the state of the metrics file at the
        checkpoint; None if there is no checkpoint.
        """
        world = self.world
        newest = world.together(self.saves.latest)
        if newest is None:
            return None
        step, path, manifest = newest
        raise_if_fixed_keys_changed(manifest["job"], self.job)
        provenance.raise_if_different(
            manifest["made_with"], self.made_with, path, self.job.checkpoint.accept_version_changes, world.leads
        )
        with self.trainer.whole_optimizer():
            checkpoint.load_tensors(path, self.trainer.model, self.trainer.optimizer, world)
        partitions: dict[str, Any] = {}
        ends = 0
        for file in sorted(name for name in manifest["files"] if name.startswith("host_")):
            state = checkpoint.load_host(f"{path}/{file}")
            self.tokenizer.raise_if_different(state["tokenizer"], path)
            partitions |= state["lanes"]
            ends = int(state["ends"])
            if self.early_stopping:
                self.early_stopping.load_state_dict(state["watch"])
        self.loader.load_state_dict({"step": step, "lanes": partitions})
        if world.leads:
            self.saves.prune(step)
            print(f"resumed from {path} (step {step} of {ends})", flush=True)
        return step, ends, manifest.get("rows")

    def save(self, metrics: Mapping[str, float]) -> float:
        """Begin to write a checkpoint; return the seconds that training waited for it."""
        host = {
            **self.loader.state_dict(),
            "ends": self.ends,
            "tokenizer": self.tokenizer.identity,
            "watch": self.early_stopping.state_dict() if self.early_stopping else None,
        }
        manifest = {"job": dump(self.job), "metrics": dict(metrics), "made_with": self.made_with}
        manifest |= {"rows": self.track.lines.state} if self.track else {}
        with self.trainer.whole_optimizer():
            return self.saver.save(self.step, self.trainer.model, self.trainer.optimizer, host, manifest)

    def export(self) -> None:
        """Export the final weights, or those of the best checkpoint if the job keeps one."""
        world, model = self.world, self.model
        self.lease.check()
        best = world.together(self.saves.best_whole)
        if best is not None and best != self.ends:
            path = self.saves.path(best)
            with self.trainer.whole_optimizer():
                checkpoint.load_tensors(path, model, self.trainer.optimizer, world)
            if world.leads:
                print(
                    f"train: exporting step {best}, the best by {self.job.checkpoint.best}",
                    flush=True,
                )
        if world.leads:
            provenance.write(self.run, self.made_with)
        export(model, self.family, self.directory, self.run / MODEL, world, self.tokenizer_path)
        if self.spec.lora:
            export_adapter(
                model, self.family, self.directory, self.run / MODEL, world, self.spec, self.job.train.precision
            )

    def close(self) -> None:
        """Stop the loader, wait for the last checkpoint and close the tracker."""
        self.loader.close()
        self.saver.close()
        if self.track:
            self.track.close()


def first_document(batch: Batch) -> list[int]:
    """Return the tokens of the first document of a batch."""
    return batch.tokens[0][batch.segments[0] == batch.segments[0, 0]].tolist()


def early_stopping_of(job: Job) -> EarlyStopping | None:
    """Return the early stopping of `train.early_stopping`, or None if the job has none."""
    if job.train.early_stopping is None:
        return None
    return EarlyStopping(job.checkpoint.best or f"loss/{next(iter(job.data.validation))}", job.train.early_stopping)


def out_of_memory(job: Job, error: torch.OutOfMemoryError) -> UserError:
    """Return the error for a GPU that ran out of memory, with the settings that lower its use."""
    train = job.train
    advice: list[str] = []
    if train.micro_batch_sequences > 1:
        advice.append(
            f"lower train.micro_batch_sequences (now {train.micro_batch_sequences}; the global batch stays the same)"
        )
    if train.activation_checkpointing != "offload":
        stronger = "offload" if train.activation_checkpointing == "block" else "block"
        advice.append(f"set train.activation_checkpointing: {stronger}")
    if train.optimizer == "adamw":
        advice.append("set train.optimizer: adamw_offload")
    eight_bit = ", train.optimizer: adamw_8bit" * (train.optimizer == "adamw")
    advice.append("raise compute.workers or compute.mesh.tensor_parallel_size")
    return UserError(
        f"out of memory ({str(error).splitlines()[0]}). To continue this run, {', or '.join(advice)}. A new run could "
        f"also have a lower data.seq_len{eight_bit}, or train adapters (model.lora). `ptf plan CONFIG "
        "--workers N --fit` looks for settings that fit"
    )


# Metrics of jobs that allow samples to be cut or rows to be skipped, each with a function that returns whether a job
# has it; the metric's name, and the count's. Tokenized data has these counts in its manifest instead.
COUNTED = {
    ("shortened_samples", "truncated"): lambda job: (
        job.data.too_long in ("truncate", "split") and not all_tokenized(job)
    ),
    ("bad_rows", "bad"): lambda job: job.data.max_bad_rows_share > 0 and not all_tokenized(job),
}


def all_tokenized(job: Job) -> bool:
    """Return whether every source of the job is tokenized already."""
    return all(source.kind == "tokenized" for source in job.data.sources.values())


def announce(job: Job, world: World, model: Decoder, steps: int, plan: DataPlan | None = None) -> None:
    """Print the run's first lines: the steps, workers, device, attention and sizes, and with `plan` the passes."""
    if world.leads:
        config = model.config
        attention = attention_of(model, world.device)
        print(
            f"train: {steps} steps of {job.train.global_batch_sequences} sequences × {job.data.seq_len} tokens, "
            f"workers={world.size}, device={world.device}, "
            f"{job.train.precision}, attention={attention}, "
            f"{compilation(job.model.backend == 'ptf' and job.train.compile, world.device, model.kernels)}, "
            f"{config.num_layers} layers × {config.dim}",
            flush=True,
        )
        if plan:
            print(f"train: {plan.describe()}", flush=True)
