"""The offline loop, the same program on every rank."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptf import recipes
from ptf.compute import checkpoint
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.meter import memory_gib, peak_flops
from ptf.compute.tracking import Tracker
from ptf.compute.world import World
from ptf.config import Job, dump
from ptf.data.loader import Loader
from ptf.data.packing import pack_all
from ptf.data.pipeline import Lanes, atoms_once
from ptf.data.sample import Atom
from ptf.data.sources import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.flops import Flops
from ptf.model.vocabulary import refuse_larger_tokenizer
from ptf.recipes import Recipe
from ptf.train.adapter import export_adapter
from ptf.train.export import export
from ptf.train.resume import refuse_frozen_changes
from ptf.train.start import adapted_from, extended, tokenizer_directory
from ptf.train.trainer import Trainer, load_model
from ptf.train.validate import held_out_loss


def fit(job: Job, world: World, run: Path) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one; leaves `run/model`, a Hugging Face directory, and
    with LoRA `run/adapter`."""
    recipe = recipes.build(job)
    directory = bridge.locate(job.model.path, job.model.revision)
    spec, directory = world.share(extended(job.model, directory, run, job.seed) if world.leads else None)  # type: ignore[misc]
    tokenizer_path = str(world.share(tokenizer_directory(spec, directory, run) if world.leads else None))
    tokenizer = Tokenizer.load(tokenizer_path)
    if world.leads and (trap := tokenizer.class_trap()):
        print(f"train: {trap}", flush=True)
    refuse_larger_tokenizer(directory, tokenizer_path, tokenizer.vocab_size)
    spec, directory = world.share(adapted_from(spec, directory, run, tokenizer_path, job.seed) if world.leads else None)  # type: ignore[misc]
    model, family = load_model(
        directory, world, spec, seed=job.seed, precision=job.train.precision, head=recipe.head,
        recomputed=job.train.checkpointing, compiled=job.train.compile,
    )  # fmt: skip
    trainer = Trainer(model, world, job.train)
    loader = make_loader(job, recipe, tokenizer, world, run)
    held_out = held_out_rows(job, recipe, tokenizer)
    saves = Checkpoints(run / "checkpoints", every=job.checkpoint.every, keep=job.checkpoint.keep, steps=job.train.steps or 0)
    flops, peak = Flops.of(model), peak_flops(world.device, job.train.precision) * world.size
    start, ends = restore(saves, job, trainer, loader, tokenizer, world) or (0, planned_steps(job, loader, world))
    announce(job, world, model.config, ends)
    step, planned = start, ends
    saves.steps = ends
    trainer.schedule = replace(trainer.schedule, steps=ends)
    track = Tracker(run, resumed=start, steps=ends, tensorboard=job.track.tensorboard, print_every=job.track.print_every) if world.leads else None
    try:
        while step < ends:
            began = time.perf_counter()
            micro = next(loader)
            metrics = trainer.step(micro, recipe, step)
            lengths = [n for batch in micro for n in batch.lengths]
            targets = sum(int((batch.weights != 0).sum()) for batch in micro)
            slots = sum(batch.tokens.numel() for batch in micro)
            tokens, work, slots = world.sum([sum(lengths), flops.step(lengths, targets), slots]).tolist()
            metrics |= {"tokens": tokens, "fill": tokens / slots}
            for name in job.data.sources:
                if share := metrics.get(f"share/{name}"):
                    metrics[f"loss/{name}"] /= share
                else:  # it is the only source, or has nothing in this step
                    metrics.pop(f"loss/{name}", None)
            if counted := [name for name, there in COUNTED.items() if there(job)]:
                metrics |= dict(zip(counted, world.sum([loader.counts[name] for name in counted]).tolist(), strict=True))
            spent = time.perf_counter() - began
            if job.data.validation and job.train.validate_every and ((step + 1) % job.train.validate_every == 0 or step + 1 == ends):
                losses = held_out_loss(model, recipe, held_out, world, job.train.micro_rows, job.data.seq_len)
                metrics |= losses
                if ends == planned and job.train.decay_at and next(iter(losses.values())) <= job.train.decay_at:
                    ends = saves.steps = min(ends, step + 1 + (job.train.decay or 0))
                    trainer.schedule = replace(trainer.schedule, steps=ends)
                    if track:
                        track.steps = ends
            metrics |= {"tok_s": tokens / spent, "mfu": work / spent / peak, "mem_gib": memory_gib(world.device)}
            metrics |= {"data_wait_s": loader.waited_s, "step_s": spent}
            step += 1
            if track:
                track.log(step, metrics)
            if saves.due(step):
                save(saves, step, ends, job, trainer, loader, tokenizer, world)
    finally:
        loader.close()
        if track:
            track.close()
    export(model, family, directory, run / "model", world, tokenizer_path)
    if spec.lora:
        export_adapter(model, family, directory, run / "model", world, spec, job.train.precision)


COUNTED = {  # rows and samples that are not trained as they are, in the metrics of jobs that allow it
    "dropped": lambda job: job.data.too_long != "error",
    "truncated": lambda job: job.data.too_long in ("truncate", "split"),
    "bad": lambda job: job.data.on_bad_row == "skip",
}


def planned_steps(job: Job, loader: Loader, world: World) -> int:
    """Of the whole run: `train.steps`, or as many as the data has where that is fewer."""
    if loader.endless:
        assert job.train.steps is not None, "the schema lets no endless data train without train.steps"
        return job.train.steps
    if world.leads:
        print("train: counting the steps that the data has", flush=True)
    steps = int(world.max(loader.steps()))
    if not steps:
        raise UserError("the data has no sample to train on")
    return min(steps, job.train.steps or steps)


def specs(sources: Any, epochs: int | None = None) -> dict[str, SourceSpec]:
    """The config's sources as plain values; `epochs` is for those that have none of their own."""
    return {name: SourceSpec(s.path, s.weight, s.kind, s.columns, s.limit, s.epochs or epochs) for name, s in sources.items()}


def make_loader(job: Job, recipe: Recipe, tokenizer: Tokenizer, world: World, run: Path) -> Loader:
    data = job.data
    lanes = Lanes(
        specs(data.sources, job.train.epochs), tokenizer, lambda row, source: recipe.encode(row, tokenizer, source), lanes=data.lanes, seed=job.seed,
        shuffle=data.shuffle, seq_len=data.seq_len, lookahead=data.lookahead, too_long=data.too_long, temperature=data.mix.temperature, by=data.mix.by,
        exhausted=data.mix.exhausted, quarantine=str(run / "quarantine") if data.on_bad_row == "skip" else None, max_bad=data.max_bad,
    )  # fmt: skip
    return Loader(
        lanes, lanes=data.lanes, rows=job.train.rows, rank=world.data_rank, world_size=world.data_size,
        micro_rows=job.train.micro_rows, seq_len=data.seq_len, prefetch=data.prefetch, timeout_s=job.compute.timeout_s,
    )  # fmt: skip


def held_out_rows(job: Job, recipe: Recipe, tokenizer: Tokenizer) -> dict[str, list[list[Atom]]]:
    """The validation sets, packed."""
    encode = lambda row, source: recipe.encode(row, tokenizer, source)  # noqa: E731
    once = lambda name, spec: atoms_once({name: spec}, tokenizer=tokenizer, encode=encode, seq_len=job.data.seq_len, too_long=job.data.too_long)  # noqa: E731
    return {name: pack_all(once(name, spec), job.data.seq_len) for name, spec in specs(job.data.validation).items()}


def announce(job: Job, world: World, config: Any, steps: int) -> None:
    """The run's first lines: what was chosen, and why if it is not what one would expect."""
    if world.leads:
        attention = "flex_attention" if world.device.type == "cuda" else "SDPA per document (FlexAttention has no backward on a CPU)"
        if job.model.backend == "hf":
            attention = "transformers' (a row for each document; no dropout, no load-balancing loss)"
        print(f"train: {steps} steps of {job.train.rows} rows × {job.data.seq_len} tokens, workers={world.size}, device={world.device}, "
              f"{job.train.precision}, attention={attention}, {config.layers} layers × {config.dim}", flush=True)  # fmt: skip


def restore(saves: Checkpoints, job: Job, trainer: Trainer, loader: Loader, tokenizer: Tokenizer, world: World) -> tuple[int, int] | None:
    """Continue from the newest good checkpoint: the steps that are done, and the step at which the run ends; None if there is no checkpoint."""
    found = world.share(saves.latest() if world.leads else None)
    if found is None:
        return None
    step, path, text = found  # type: ignore[misc]
    refuse_frozen_changes(text, job)
    checkpoint.load_tensors(path, trainer.model, trainer.optimizer, world)
    lanes: dict[str, Any] = {}
    ends = 0
    for file in sorted(path.glob("host_*.pt")):
        state = checkpoint.load_host(file)
        tokenizer.refuse_other(state["tokenizer"], str(path))
        lanes |= state["lanes"]
        ends = int(state["ends"])
    loader.load_state_dict({"step": step, "lanes": lanes})
    if world.leads:
        print(f"resumed from {path} (step {step} of {ends})", flush=True)
    return step, ends


def save(saves: Checkpoints, step: int, ends: int, job: Job, trainer: Trainer, loader: Loader, tokenizer: Tokenizer, world: World) -> None:
    """Every rank writes its part, then rank 0 the manifest."""
    path = Path(str(world.share(str(saves.begin(step)) if world.leads else None)))
    checkpoint.save_tensors(path, trainer.model, trainer.optimizer, world)
    checkpoint.save_host(path / f"host_{world.rank:05}.pt", {**loader.state_dict(), "ends": ends, "tokenizer": tokenizer.identity})
    world.barrier()
    if world.leads:
        saves.commit(step, dump(job))
    world.barrier()
