"""The offline training loop; every rank runs the same program."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from ptf.compute import checkpoint, provenance
from ptf.compute.lease import Lease
from ptf.compute.shutdown import is_asked_to_stop, sigterm_stops
from ptf.compute.tracking import Tracker
from ptf.compute.world import World
from ptf.config import Job, dump, loads, raise_if_fixed_keys_changed
from ptf.data.batch import Batch
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import DataPlan
from ptf.errors import Stopped, UserError
from ptf.train.adapter import export_adapter
from ptf.train.dataloading import planned_steps
from ptf.train.export import MODEL, export
from ptf.train.load_comparison import compare_with_transformers
from ptf.train.optim import Schedule
from ptf.train.parts import Parts
from ptf.train.step_metrics import StepMeter
from ptf.train.validate import EarlyStopping, held_out_metrics
from ptf.train.warm_up import in_passes, warm_up
from ptf.workspace import progress

MOST_NONFINITE = 10  # so many consecutive steps without a finite loss end the run


def train_offline(job: Job, world: World, run: Path, lease: Lease) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one.

    Writes `run/model`, a Hugging Face directory, and with LoRA `run/adapter`. Raises Stopped if the run was stopped on
    request before its end, and LeaseLost if a different process has taken over the run.
    """
    with progress.stage("train") if world.leads else nullcontext():
        try:
            with world.clock.phase("loading"):
                loop = Loop(Parts(job, world, run, lease))
            with closing(loop), sigterm_stops(run):
                loop.fit()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(job, error) from error
        with world.clock.phase("export"):
            export_run(loop.parts, loop.ends)


class Loop:
    """The loop over the parts of a run, and how far it is."""

    def __init__(self, parts: Parts) -> None:
        """Continue from the newest checkpoint, or plan the run from step 0; print its first lines, and compile."""
        job, world = parts.job, parts.world
        patience, first = job.train.early_stopping, next(iter(job.data.validation), "")
        metric = job.checkpoint.best or f"loss/{first}"
        self.parts, self.clock = parts, world.clock
        self.early_stopping = None if patience is None else EarlyStopping(metric, patience)
        self.meter = StepMeter(job, world, parts.model, parts.frozen_models, parts.loader)
        restored = self.restore()
        plan = None if restored else planned_steps(job, parts.partitions, parts.loader, world)
        self.step, self.planned, rows = restored or (0, cast("DataPlan", plan).steps[1], None)
        # warm-up and decay are shares of the configured run; its end may have been moved nearer before this resume
        parts.trainer.schedule = Schedule.of(job.train, job.train.steps or self.planned)
        self.track: Tracker | None = None
        self.end_at(self.planned)
        if world.leads:
            model = parts.model
            print(
                f"train: {self.planned} steps of {job.train.global_batch_sequences} sequences × {job.data.seq_len} "
                f"tokens, workers={world.size} ({world.meshes.sizes}), device={world.device}, "
                f"{job.train.precision}, attention={model.attention_name(world.device)}, "
                f"{model.kernels.compilation}, "
                f"{len(model.config.layers)} layers × {model.config.dim}",
                flush=True,
            )
            if plan:
                print(f"train: {plan.describe()}", flush=True)
            self.track = Tracker(
                parts.run, job.track, resumed=self.step, steps=self.ends, lease=parts.lease, expected=rows
            )
        most, seq_len = job.train.micro_batch_sequences, job.data.seq_len
        trained = in_passes(job.train.global_batch_sequences // world.meshes.sizes.data, most)
        validated = {most} if job.train.validate_every and job.data.validation else set[int]()
        # without its adapters, the model may be a frozen model, too
        scored = validated | (trained if parts.model in parts.frozen_models.values() else set())
        warm_up(parts.model, world, seq_len, trained=trained, scored=scored, share_prefixes=job.data.share_prefixes)
        for frozen_model in parts.frozen_models.values():
            if frozen_model is not parts.model:
                warm_up(frozen_model, world, seq_len, scored=validated | trained)
        self.skipped = 0  # number of consecutive skipped steps
        self.clock.step = self.step

    def fit(self) -> None:
        """Run the loop: step, validate, log, checkpoint. Raises Stopped if the run stops on request before its end."""
        job, saves, checkpoint_wait = self.parts.job, self.parts.saves, 0.0
        validate_every = job.train.validate_every if job.data.validation else None
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
            if saves.due(self.step) or is_stopping:
                with self.clock.phase("checkpoint"):
                    checkpoint_wait = self.save(metrics)
            if is_stopping:
                break
        with self.clock.phase("last_checkpoint"):
            self.parts.saver.wait()
        if self.step < self.ends:
            raise Stopped(self.step, self.ends, saves.path(self.step))

    def one_step(self) -> tuple[dict[str, float], bool]:
        """Train one step; return its metrics, and whether any rank has a request to stop."""
        parts, world = self.parts, self.parts.world
        began = time.perf_counter()
        with self.clock.phase("data"):
            micro = next(parts.loader)
        if self.step == 0:
            with self.clock.phase("loading"):
                # the first document
                row = world.together(lambda: micro[0].tokens[0, : micro[0].lengths[0]].tolist() if micro else [])
                source, precision = parts.source, parts.job.train.precision
                compare_with_transformers(parts.model, source.directory, source.section, row, world, precision)
            began = time.perf_counter()
        world.seed(parts.job.seed, self.step)
        try:
            metrics = parts.trainer.step(micro, parts.recipe, self.step, parts.loader.numbers)
            self.skipped = 0
        except FloatingPointError as error:
            metrics = self.skip_step(error, micro)
        with self.clock.phase("metrics"):
            return self.meter.measured(metrics, micro, began, is_asked_to_stop(parts.run))

    def skip_step(self, error: FloatingPointError, micro: Sequence[Batch]) -> dict[str, float]:
        """Write the documents of a step whose loss or gradient was not finite, and return its metrics.

        Raises UserError if `train.on_nonfinite` is `stop`, or after too many consecutive steps.
        """
        parts, world = self.parts, self.parts.world
        self.skipped += 1
        directory = _write_documents(parts.run, self.step + 1, micro, parts.tokenizer, world)
        if parts.job.train.on_nonfinite == "stop" or self.skipped >= MOST_NONFINITE:
            repeats = f", {self.skipped} times in a row" if self.skipped > 1 else ""
            raise UserError(
                f"{error}{repeats}. The documents of this step are in {directory}; continue this run with "
                "train.on_nonfinite: skip, or start one with a lower train.lr or train.max_grad_norm"
            ) from error
        if world.leads:
            print(f"{error}; the step is skipped. Its documents are in {directory}", flush=True)
        return {"nonfinite_step_skipped": 1.0}

    def validate(self) -> dict[str, float]:
        """Measure the held-out losses. Early stopping and `train.lr_decay_at_loss` may move the end of the run
        nearer."""
        parts, train = self.parts, self.parts.job.train
        losses = held_out_metrics(
            parts.model,
            parts.recipe,
            parts.held_out,
            parts.model_world,
            1 if train.deterministic else train.micro_batch_sequences,
            parts.job.data.seq_len,
            parts.frozen_models,
        )
        if (
            self.ends == self.planned
            and train.lr_decay_at_loss
            and losses[f"loss/{next(iter(parts.held_out))}"] <= train.lr_decay_at_loss
        ):
            self.end_at(min(self.ends, self.step + 1 + (parts.trainer.schedule.decay or 0)))
        if self.early_stopping and self.early_stopping(losses):
            self.end_at(self.step + 1)
            if parts.world.leads:
                watched, times = self.early_stopping.metric, self.early_stopping.patience
                print(f"train: {watched} has not improved {times} times in a row: training stops now", flush=True)
        return losses

    def end_at(self, ends: int) -> None:
        """Have the run end after that many steps."""
        self.ends = self.parts.saves.steps = ends
        self.parts.trainer.schedule = replace(self.parts.trainer.schedule, steps=ends)
        if self.track:
            self.track.steps = ends

    def restore(self) -> tuple[int, int, dict[str, Any] | None] | None:
        """Continue from the newest checkpoint that verifies.

        Returns the number of finished steps, the step at which the run ends, and the state of the metrics file at the
        checkpoint; None if there is no checkpoint.
        """
        parts, world, trainer = self.parts, self.parts.world, self.parts.trainer
        newest = world.together(parts.saves.latest)
        if newest is None:
            return None
        step, path, manifest = newest
        raise_if_fixed_keys_changed(loads(manifest["job"]), parts.job)
        provenance.raise_if_different(
            manifest["made_with"], parts.made_with, path, parts.job.checkpoint.accept_version_changes, world.leads
        )
        with trainer.whole_optimizer():
            checkpoint.load_tensors(path, trainer.model, trainer.optimizer, world)
        partitions: dict[str, Any] = {}
        ends = 0
        for file in sorted(name for name in manifest["files"] if name.startswith("host_")):
            state = checkpoint.load_host(f"{path}/{file}")
            parts.tokenizer.raise_if_different(state["tokenizer"], path)
            partitions |= state["partitions"]
            ends = int(state["ends"])
            if self.early_stopping:
                self.early_stopping.load_state_dict(state["watch"])
        parts.loader.load_state_dict({"step": step, "partitions": partitions})
        if world.leads:
            parts.saves.prune(step)
            print(f"resumed from {path} (step {step} of {ends})", flush=True)
        return step, ends, manifest.get("rows")

    def save(self, metrics: Mapping[str, float]) -> float:
        """Begin to write a checkpoint; return the seconds that training waited for it."""
        parts, trainer = self.parts, self.parts.trainer
        host = {
            **parts.loader.state_dict(),
            "ends": self.ends,
            "tokenizer": parts.tokenizer.identity,
            "watch": self.early_stopping.state_dict() if self.early_stopping else None,
        }
        manifest = {"job": dump(parts.job), "metrics": dict(metrics), "made_with": parts.made_with}
        manifest |= {"rows": self.track.lines.state} if self.track else {}
        with trainer.whole_optimizer():
            return parts.saver.save(self.step, trainer.model, trainer.optimizer, host, manifest)

    def close(self) -> None:
        """Stop the loader, wait for a checkpoint that is being written, after an error, and close the tracker."""
        self.parts.loader.close()
        self.parts.saver.writer.join(60.0)
        if self.track:
            self.track.close()


def _write_documents(run: Path, step: int, batches: Sequence[Batch], tokenizer: Tokenizer, world: World) -> Path:
    """Write this rank's documents of the step and return the directory of all ranks.

    Each document is one JSON object on a line, with its ids and its text.
    """
    directory = run / "nonfinite" / f"step_{step:08}"
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for batch in batches:
        tokens, segments = batch.tokens[batch.segments >= 0], batch.segments[batch.segments >= 0]
        for document, source in enumerate(batch.sources):
            ids = tokens[segments == document].tolist()
            lines.append(json.dumps({"source": source, "tokens": ids, "text": tokenizer.decode(ids)}) + "\n")
    (directory / f"rank_{world.rank:05}.jsonl").write_text("".join(lines))
    return directory


def export_run(parts: Parts, ends: int) -> None:
    """Export the final weights, those of step `ends`, or those of the best checkpoint if the job keeps one."""
    job, world, source, model, merged = parts.job, parts.world, parts.source, parts.model, parts.run / MODEL
    parts.lease.check()
    best = None
    if job.checkpoint.best:
        best = world.together(lambda: parts.saves.first_whole(parts.saves.ranked(), "the next best"))
    if best is not None and best[0] != ends:
        with parts.trainer.whole_optimizer():
            checkpoint.load_tensors(parts.saves.path(best[0]), model, parts.trainer.optimizer, world)
        if world.leads:
            print(f"train: exporting step {best[0]}, the best by {job.checkpoint.best}", flush=True)
    if world.leads:
        provenance.write(parts.run, parts.made_with)
    export(model, source.directory, merged, world, source.tokenizer_path)
    if source.section.lora:
        export_adapter(model, source.directory, merged, world, source.section, job.train.precision)


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
    advice.append("raise compute.workers, compute.mesh.tensor_parallel_size or compute.mesh.context_parallel_size")
    return UserError(
        f"out of memory ({str(error).splitlines()[0]}). To continue this run, {', or '.join(advice)}. A new run could "
        f"also have a lower data.seq_len{eight_bit}, or train adapters (model.lora). `ptf plan CONFIG "
        "--workers N --fit` looks for settings that fit"
    )
