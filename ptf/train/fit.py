"""The offline loop, the same program on every rank."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptf import recipes
from ptf.compute import checkpoint, provenance
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.leave import Requests, on_sigterm
from ptf.compute.meter import memory_gib, peak_flops
from ptf.compute.saver import Saver, host_file
from ptf.compute.tracking import Tracker
from ptf.compute.world import World, alone, random_state, set_random_state
from ptf.config import Job, dump
from ptf.data.batch import Batch
from ptf.data.passes import Planned
from ptf.data.sources import fingerprints, first_lines
from ptf.data.tokenizer import Tokenizer
from ptf.errors import Left, UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.flops import Flops
from ptf.model.vocabulary import refuse_larger_tokenizer
from ptf.recipes import Companion
from ptf.train import nonfinite
from ptf.train.adapter import export_adapter
from ptf.train.annotate import annotated
from ptf.train.canonical import trainer_of
from ptf.train.companions import companions, forward_flops
from ptf.train.export import MODEL, export
from ptf.train.reading import held_out_rows, make_lanes, make_loader, planned_steps, specs
from ptf.train.resume import refuse_frozen_changes
from ptf.train.start import adapted_from, extended, tokenizer_directory
from ptf.train.trainer import load_model
from ptf.train.validate import held_out_loss
from ptf.train.watch import Watch


def fit(job: Job, world: World, run: Path, lease: Lease) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one; leaves `run/model`, a Hugging Face directory, and
    with LoRA `run/adapter`. Raises Left where it was asked to end before, LeaseLost where another process has taken the run over."""
    try:
        with world.clock.phase("loading"):
            one = Fit(job, world, run, lease)
        try:
            with on_sigterm(one.leave.note):
                one.train()
        finally:
            one.close()
    except torch.OutOfMemoryError as error:
        raise out_of_memory(job, error) from error
    with world.clock.phase("export"):
        one.export()


class Fit:
    """One attempt at a run, on one rank."""

    def __init__(self, job: Job, world: World, run: Path, lease: Lease) -> None:
        self.job, self.world, self.run, self.lease, self.recipe = job, world, run, lease, recipes.build(job)
        directory = bridge.locate(job.model.path, job.model.revision, verify_up_to=job.verify_bytes)
        spec, directory = world.share(extended(job.model, directory, run, job.seed) if world.leads else None)  # type: ignore[misc]
        self.tokenizer_path = str(world.share(tokenizer_directory(job, spec, directory, run) if world.leads else None))
        self.tokenizer = Tokenizer.load(self.tokenizer_path)
        if world.leads and (trap := self.tokenizer.class_trap()):
            print(f"train: {trap}", flush=True)
        refuse_larger_tokenizer(directory, self.tokenizer_path, self.tokenizer.vocab_size)
        self.spec, self.directory = world.share(  # type: ignore[misc]
            adapted_from(spec, directory, run, self.tokenizer_path, job.seed) if world.leads else None
        )
        self.within = alone(world) if job.train.deterministic else world  # who holds the model together
        self.model, self.family = load_model(
            self.directory, self.within, self.spec, seed=job.seed, precision=job.train.precision, head=self.recipe.head,
            recomputed=job.train.checkpointing, compiled=job.train.compile,
        )  # fmt: skip
        reading, self.companions = job, {}
        if getattr(self.recipe, "precomputed", False):
            reading = annotated(job, self.recipe, self.tokenizer, world, self.model, self.directory, self.loaded)  # type: ignore[arg-type]
        else:
            self.companions = self.loaded(self.recipe.companions)
        self.trainer = trainer_of(job.train, self.model, world, self.companions)
        self.trainer.refuse_large(job.train.rows)
        lanes = make_lanes(reading, self.recipe, self.tokenizer, run)
        self.loader = make_loader(reading, lanes, world)
        self.held_out = held_out_rows(reading, self.recipe, self.tokenizer, run / "quarantine" if world.leads else None)
        self.saves, self.watch, self.leave = Checkpoints.of(job, run, lease), watch_of(job), Requests(run)
        self.saver = Saver(self.saves, world, job.compute.timeout_s)
        if world.leads:
            print("\n".join(first_lines(specs(reading.data.sources))), flush=True)
        found = fingerprints(specs(job.data.sources)) if world.leads else {}
        self.made_with: dict[str, Any] = world.share(provenance.made_with(world.device, found, self.tokenizer.fingerprint()))  # type: ignore[assignment]
        self.flops = [Flops.of(self.model), *map(forward_flops, self.companions.values())]
        self.peak = peak_flops(world.device, job.train.precision) * world.size
        self.clock = world.clock
        found = self.restore()
        takes = None if found else planned_steps(job, lanes, self.loader, world)
        self.step, ends, rows = found or (0, takes.steps[1], None)  # type: ignore[union-attr]
        announce(job, world, self.model.config, ends, takes)
        self.planned = ends
        self.track: Tracker | None = None
        self.end_at(ends)
        if world.leads:
            self.track = Tracker(run, job.track, resumed=self.step, steps=ends, lease=lease, said=rows)
        self.skipped = 0  # steps, one after the other
        self.clock.step = self.step

    def loaded(self, wanted: Mapping[str, Companion]) -> dict[str, Decoder]:
        return companions(wanted, self.job, self.world, self.within, self.model, self.spec, self.directory, self.run, self.tokenizer_path)

    def end_at(self, ends: int) -> None:
        """After how many steps the run ends."""
        self.ends = self.saves.steps = ends
        self.trainer.schedule = replace(self.trainer.schedule, steps=ends)
        if self.track:
            self.track.steps = ends

    def train(self) -> None:
        stalled, step = 0.0, self.job.train.validate_every
        self.clock.take()  # so far it was loading
        while self.step < self.ends:
            metrics, leaving = self.one_step()
            if self.job.data.validation and step and ((self.step + 1) % step == 0 or self.step + 1 == self.ends):
                with self.clock.phase("validate"):
                    metrics |= self.validate()
            self.step = self.clock.step = self.step + 1
            seconds = self.clock.take()
            if self.track:
                self.track.log(self.step, metrics | {"checkpoint_wait_s": stalled} | seconds)
            stalled = 0.0
            if self.saves.due(self.step) or leaving:
                with self.clock.phase("checkpoint"):
                    stalled = self.save(metrics)
            if leaving and self.step < self.ends:
                self.written()
                raise Left(self.step, self.ends, self.saves.path(self.step))
        self.written()

    def written(self) -> None:
        """The last checkpoint is."""
        with self.clock.phase("last_checkpoint"):
            self.saver.wait()

    def one_step(self) -> tuple[dict[str, float], bool]:
        """The metrics of the next step, and whether some rank was asked to end."""
        began = time.perf_counter()
        with self.clock.phase("data"):
            micro = next(self.loader)
        try:
            metrics, self.skipped = self.trainer.step(micro, self.recipe, self.step, self.loader.numbers), 0
        except FloatingPointError as error:
            metrics = self.left_out(error, micro)
        with self.clock.phase("metrics"):
            return self.measured(metrics, micro, began)

    def measured(self, metrics: dict[str, float], micro: Sequence[Batch], began: float) -> tuple[dict[str, float], bool]:
        """What is known of a step on all ranks together."""
        job, world = self.job, self.world
        lengths = [n for batch in micro for n in batch.lengths]
        begins = [n for batch in micro for n in batch.begins]
        targets = sum(int((batch.weights != 0).sum()) for batch in micro)
        slots = sum(batch.tokens.numel() for batch in micro)
        tokens, work, slots = world.sum([sum(lengths), sum(flops.step(lengths, targets, begins) for flops in self.flops), slots]).tolist()
        metrics |= {"tokens": tokens, "fill": tokens / slots}
        for name in job.data.sources:
            if share := metrics.get(f"share/{name}"):
                metrics[f"loss/{name}"] /= share
            else:  # it is the only source, or has nothing in this step
                metrics.pop(f"loss/{name}", None)
        if counted := [name for name, there in COUNTED.items() if there(job)]:
            metrics |= dict(zip(counted, world.sum([self.loader.counts[name] for name in counted]).tolist(), strict=True))
        spent = time.perf_counter() - began
        metrics |= {"tok_s": tokens / spent, "mfu": work / spent / self.peak, "mem_gib": memory_gib(world.device)}
        leaving = world.max(float(self.leave.made)) > 0  # over all ranks, those of a tensor group too
        return metrics | {"data_wait_s": self.loader.waited_s, "step_s": spent}, leaving

    def left_out(self, error: FloatingPointError, micro: Sequence[Batch]) -> dict[str, float]:
        """The metrics of a step that changed nothing; raises UserError where that is not allowed. Its rows are kept either way."""
        self.skipped += 1
        place = nonfinite.keep(self.run, self.step, micro, self.tokenizer, self.world)
        if self.job.train.on_nonfinite == "stop" or self.skipped >= nonfinite.MOST:
            again = f", {self.skipped} times in a row" if self.skipped > 1 else ""
            help = "this run may go on with train.on_nonfinite: skip; a new one with a lower train.lr or train.clip"
            raise UserError(f"{error}{again}. What it was trained on is in {place}; {help}") from error
        if self.world.leads:
            print(f"{error}; left out. What it was trained on is in {place}", flush=True)
        return {"skipped": 1.0}

    def validate(self) -> dict[str, float]:
        """Held-out losses, which may bring the end nearer."""
        train = self.job.train
        rows = 1 if train.deterministic else train.micro_rows
        losses = held_out_loss(self.model, self.recipe, self.held_out, self.within, rows, self.job.data.seq_len, self.companions)
        if self.ends == self.planned and train.decay_at and losses[f"loss/{next(iter(self.held_out))}"] <= train.decay_at:
            self.end_at(min(self.ends, self.step + 1 + (train.decay or 0)))
        if self.watch and train.stop and self.watch(losses):
            self.end_at(self.step + 1)
            if self.world.leads:
                print(f"train: {train.stop.metric} has not got better {train.stop.patience} times in a row: this is the end", flush=True)
        return losses

    def restore(self) -> tuple[int, int, dict[str, Any] | None] | None:
        """Continue from the newest good checkpoint: the steps that are done, the step at which the run ends, and what the rows of metrics were; None if
        there is no checkpoint."""
        world = self.world
        found = world.share(self.saves.latest() if world.leads else None)
        if found is None:
            return None
        step, place, manifest = found  # type: ignore[misc]
        refuse_frozen_changes(manifest["job"], self.job)
        provenance.refuse_other(manifest["made_with"], self.made_with, place, self.job.checkpoint.accept_changes, world.leads)
        checkpoint.load_tensors(place, self.trainer.model, self.trainer.optimizer, world)
        lanes: dict[str, Any] = {}
        ends = 0
        for file in sorted(name for name in manifest["files"] if name.startswith("host_")):
            state = checkpoint.load_host(f"{place}/{file}")
            self.tokenizer.refuse_other(state["tokenizer"], place)
            lanes |= state["lanes"]
            ends = int(state["ends"])
            if self.watch:
                self.watch.load_state_dict(state["watch"])
            if file == host_file(world.rank):
                set_random_state(world.device, state["random"])
        self.loader.load_state_dict({"step": step, "lanes": lanes})
        if world.leads:
            print(f"resumed from {place} (step {step} of {ends})", flush=True)
        return step, ends, manifest.get("rows")

    def save(self, metrics: Mapping[str, float]) -> float:
        """Begin a checkpoint; seconds for which training waited."""
        watch = self.watch.state_dict() if self.watch else None
        host = {**self.loader.state_dict(), "ends": self.ends, "tokenizer": self.tokenizer.identity, "watch": watch}
        host["random"] = random_state(self.world.device)
        manifest = {"job": dump(self.job), "metrics": dict(metrics), "made_with": self.made_with}
        manifest |= {"rows": self.track.rows.state} if self.track else {}
        return self.saver.save(self.step, self.trainer.model, self.trainer.optimizer, host, manifest)

    def export(self) -> None:
        """The final weights, or those of the best checkpoint where one is kept."""
        world, model = self.world, self.model
        self.lease.check()
        best = world.share(self.saves.best_whole() if world.leads else None)
        if best is not None and best != self.ends:
            checkpoint.load_tensors(self.saves.path(best), model, self.trainer.optimizer, world)  # type: ignore[arg-type]
            if world.leads:
                print(f"train: the export is of step {best}, the best by {self.job.checkpoint.best and self.job.checkpoint.best.metric}", flush=True)
        if world.leads:
            provenance.write(self.run, self.made_with)
        export(model, self.family, self.directory, self.run / MODEL, world, self.tokenizer_path)
        if self.spec.lora:
            export_adapter(model, self.family, self.directory, self.run / MODEL, world, self.spec, self.job.train.precision)

    def close(self) -> None:
        self.loader.close()
        self.saver.close()
        if self.track:
            self.track.close()


def watch_of(job: Job) -> Watch | None:
    stop = job.train.stop
    return Watch(stop.metric, stop.mode, stop.patience, stop.min_delta) if stop else None


def out_of_memory(job: Job, error: torch.OutOfMemoryError) -> UserError:
    train, asks = job.train, []
    if train.micro_rows > 1:
        asks.append(f"lower train.micro_rows (now {train.micro_rows}; the loss stays the same)")
    if train.checkpointing != "block":
        asks.append("set train.checkpointing: block")
    asks += ["lower data.seq_len", "raise compute.workers or compute.mesh.tensor", "train adapters (model.lora)"]
    return UserError(f"out of memory ({str(error).splitlines()[0]}). {', or '.join(asks)}; `ptf plan` says what a job needs")


COUNTED = {  # rows and samples that are not trained as they are, in the metrics of jobs that allow it
    "dropped": lambda job: job.data.too_long != "error",
    "truncated": lambda job: job.data.too_long in ("truncate", "split"),
    "bad": lambda job: job.data.on_bad_row == "skip",
}


def announce(job: Job, world: World, config: Any, steps: int, takes: Planned | None = None) -> None:
    """The run's first lines: what was chosen, and why if it is not what one would expect."""
    if world.leads:
        attention = "flex_attention" if world.device.type == "cuda" else "SDPA per document (FlexAttention has no backward on a CPU)"
        if job.model.backend == "hf":
            attention = "transformers' (a row for each document; no dropout, no load-balancing loss)"
        print(f"train: {steps} steps of {job.train.rows} rows × {job.data.seq_len} tokens, workers={world.size}, device={world.device}, "
              f"{job.train.precision}, attention={attention}, {config.layers} layers × {config.dim}", flush=True)  # fmt: skip
        if takes:
            print(f"train: {takes.said()}", flush=True)
