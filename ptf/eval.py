"""The evaluate stage: what a checkpoint answers on held-out prompts and how often it is right; or, of a model that compares or scores answers, how
well it does that on held-out ones."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptf import gate, recipes, storage
from ptf.compute.launch import default_threads, on_ray
from ptf.compute.world import World, joined
from ptf.config import ConfigError, Job, dump, loads
from ptf.config.plug import bind
from ptf.config.schema import Plug
from ptf.data.ranking import MEASURES
from ptf.data.sample import Atom, Sample
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.gate import Worse
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.recipes.dpo import DPO
from ptf.recipes.kd import KD
from ptf.recipes.rm import RM
from ptf.rl.cluster import Pool
from ptf.rl.fit import clustered, held_out_prompts, rewards_of, sampler_spec, trie_of
from ptf.rl.ranking import TASKS, rank
from ptf.rl.validate import pass_rates
from ptf.train.companions import companions, exported
from ptf.train.deal import deal
from ptf.train.export import refuse_damaged
from ptf.train.parts import parts_of, unadapted
from ptf.train.reading import held_out_rows
from ptf.train.start import extended, start_directory, tokenizer_directory
from ptf.train.trainer import load_model
from ptf.train.validate import held_out_loss, held_out_losses

COMPARED = "compared.json"  # in the run's directory


def evaluate(job: Job, run: Path) -> dict[str, float]:
    """By name; `start/…` is of the model that training started from. Raises Corrupt where the exported model is not what was written."""
    refuse_damaged(run, job.verify_bytes)
    found = generated(job, run) | (ranked(job, run) if job.evaluate.ranking else {})
    found |= compared(job, run) if job.data.validation and not recipes.build(job).online else {}
    gate.commit_rows(run)
    return found


def compared(job: Job, run: Path) -> dict[str, float]:
    """What the recipe measures on each of `data.validation`, of the trained model, and beside it what answers' lengths alone would give. Of scores
    from 0 to 1, the area under the ROC curve and the calibration error too. On Ray by as many workers as trained it, else in this process."""
    compute = job.compute
    if compute.launcher == "ray" and not (compute.address or "").startswith("http"):
        on_ray(
            compare, (dump(job), str(run)), workers=compute.workers, device=compute.device, threads=compute.threads, address=compute.address, workdir=run,
            timeout_s=compute.timeout_s, label="evaluate",
        )  # fmt: skip
    else:
        compare(dump(job), str(run))
    return read_compared(run)


def read_compared(run: Path) -> dict[str, float]:
    """What `compare` left. Raises Corrupt."""
    return storage.record(str(run / COMPARED), gate.AGAIN, {"lineage": run.name})["metrics"]


def compare(text: str, directory: str) -> None:
    """What every rank runs; leaves the metrics in the run's directory."""
    job, run = loads(text), Path(directory)
    recipe, compute = measuring(recipes.build(job)), job.compute
    base = bridge.locate(job.model.path, job.model.revision, verify_up_to=job.verify_bytes)
    spec, base = extended(job.model, base, run, job.seed)
    tokenizer_path = tokenizer_directory(job, spec, base, run)
    sets = held_out_rows(job, recipe, Tokenizer.load(tokenizer_path), run / "quarantine" if int(os.environ.get("RANK", 0)) == 0 else None)
    metrics: dict[str, float] = {}
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    mesh = (1, 1) if alone else (compute.mesh.replicate, compute.mesh.tensor)
    with joined(compute.device, compute.timeout_s, mesh[0], compute.threads, mesh[1]) as world:
        load = lambda place: load_model(place, world, exported(spec, place), seed=job.seed, precision=job.train.precision, head=recipe.head)[0]  # noqa: E731
        model = load(run / "model")
        beside = companions(recipe.companions, job, world, world, model, unadapted(spec), base, run, tokenizer_path)
        metrics |= measured(model, recipe, sets, job, world, beside)
        by_row = gate.needs_losses(job)
        if by_row:
            leave_losses(model, recipe, sets, job, world, beside, run / gate.ROWS)
        if job.evaluate.start:
            place = world.share(str(start_directory(spec, base, run, tokenizer_path, job.seed)) if world.leads else None)
            before = load(Path(str(place)))
            metrics |= {f"start/{name}": value for name, value in measured(before, recipe, sets, job, world, beside).items()}
            if by_row:
                leave_losses(before, recipe, sets, job, world, beside, run / gate.ROWS / "start")
        for name, rows in sets.items():
            atoms = [atom for row in rows for atom in row]
            if all(len(atom) == 2 for atom in atoms):
                longer = np.array([np.sign(answer_length(chosen) - answer_length(rejected)) for chosen, rejected in atoms])
                metrics[f"accuracy_by_length/{name}"] = float((longer + 1).mean() / 2)  # of equally long ones, half
        if world.leads:
            storage.write_record(str(run / COMPARED), {"lineage": run.name, "metrics": metrics})


def measured(
    model: Decoder, recipe: recipes.Recipe, sets: Mapping[str, Sequence[Sequence[Atom]]], job: Job, world: World, beside: Mapping[str, Decoder]
) -> dict[str, float]:
    """What the recipe says of one model; of scores from 0 to 1, how well it tells those above 0.5 from the others too, and what lengths alone would."""
    micro_rows, width = job.train.micro_rows, job.data.seq_len
    found = named(held_out_loss(model, recipe, sets, world, micro_rows, width, beside), recipe)
    if not (isinstance(recipe, RM) and recipe.form == "binary"):
        return found
    for name, rows in sets.items():
        scores, truth, lengths = scored(model, recipe, rows, world, micro_rows, width)
        found[f"calibration_error/{name}"] = calibration_error(1 / (1 + np.exp(-scores)), truth)
        if 0 < (truth > 0.5).sum() < len(truth):  # it is the order of two kinds
            found |= {f"auc/{name}": auc(scores, truth > 0.5), f"auc_by_length/{name}": auc(lengths, truth > 0.5)}
    return found


def leave_losses(
    model: Decoder, recipe: recipes.Recipe, sets: Mapping[str, Sequence[Sequence[Atom]]], job: Job, world: World, beside: Mapping[str, Decoder], place: Path
) -> None:  # fmt: skip
    """For the gate: the loss of each held-out row, in files that are alike for every model."""
    for name, rows in sets.items():
        found = held_out_losses(model, recipe, rows, world, job.data.seq_len, beside)
        if world.leads:
            lines = [json.dumps({"value": value, "denominator": denominator}) + "\n" for value, denominator in found.tolist()]
            storage.write_text(str(place / f"{name}.jsonl"), "".join(lines))


def measuring(recipe: recipes.Recipe) -> recipes.Recipe:
    """As its models are measured: beside companions that are there, and, in distillation, by KL(teacher ‖ student) and the loss of the data."""
    if isinstance(recipe, KD):
        return replace(recipe, form="forward", temperature=1.0, ce=1.0, top_k=None, precomputed=False)
    return replace(recipe, precomputed=False) if isinstance(recipe, DPO) else recipe


def named(metrics: Mapping[str, float], recipe: recipes.Recipe) -> dict[str, float]:
    """Under the names that they are known by: of distillation, `kl/NAME` and `ce/NAME`; their sum is nothing that is looked at."""
    if not isinstance(recipe, KD):
        return dict(metrics)
    return {name.replace("divergence", "kl", 1): value for name, value in metrics.items() if not name.startswith("loss/")}


def answer_length(sample: Sample) -> int:
    return int((sample.weights != 0).sum())


@torch.no_grad()
def scored(model: Decoder, recipe: RM, rows: Sequence[Sequence[Atom]], world: World, micro_rows: int, width: int) -> np.ndarray:
    """Scores, rewards and lengths of all answers, on every rank: [3, answers]."""
    found = []
    for batch in deal(rows, world, micro_rows, width):
        batch = batch.to(world.device)
        what = recipe.scores(model, batch), *(recipe.judged(batch, name) for name in ("score", "answer_length"))
        found.append(torch.stack(what).cpu().numpy())
    mine = np.concatenate(found, axis=1)
    return np.concatenate([mine for rank, mine in enumerate(world.gather(mine)) if rank % world.tensor == 0], axis=1)  # a tensor group has the same


def auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """Chance that a true one scores more than a false one, half of it where they score the same (Mann and Whitney 1947). Both kinds must be there."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    true, false = int(truth.sum()), int((~truth).sum())
    return float((ranks[truth].sum() - true * (true + 1) / 2) / (true * false))


def calibration_error(probabilities: np.ndarray, truth: np.ndarray, bins: int = 10) -> float:
    """Mean over answers of how far, in each of `bins` equal intervals, the mean probability is from the share that is true (Guo et al. 2017, eq. 3)."""
    inside = np.minimum((probabilities * bins).astype(int), bins - 1)
    gaps = [abs(float((probabilities - truth)[inside == b].sum())) for b in range(bins)]
    return sum(gaps) / len(truth)


def generated(job: Job, run: Path) -> dict[str, float]:
    """pass@1, pass@k and mean reward on each of `evaluate.sources`, of the trained model and, as `start/…`, of the model it started from.
    The greedy answers are left in `run/answers/`, those of the start in `run/answers/start/`."""
    knobs = job.evaluate
    rewards = rewards_of(job, knobs.reward or (job.rollout.reward if job.rollout else None))
    if not knobs.sources or not (rewards or (job.rollout and job.rollout.environment)):
        return {}
    base = bridge.locate(job.model.path, job.model.revision, verify_up_to=job.verify_bytes)
    spec, base = extended(job.model, base, run, job.seed)
    tokenizer_path = tokenizer_directory(job, spec, base, run)
    tokenizer = Tokenizer.load(tokenizer_path)
    prompts, trie = held_out_prompts(job.evaluate.sources, tokenizer, knobs.limit), trie_of(job.rollout, tokenizer)
    models = {"": run / "model"} | ({"start/": start_directory(spec, base, run, tokenizer_path, job.seed)} if knobs.start else {})
    metrics: dict[str, float] = {}
    length = max(len(p.tokens) for asked in prompts.values() for p in asked) + knobs.max_new_tokens
    if job.rollout and job.rollout.environment:
        length = max(length, job.data.seq_len)
    max_no_result = job.rollout.max_no_result if job.rollout else 0.1
    try:
        pool = Pool("rollout", frozenset({"rollout"}), (len(models),))
        with clustered(job, run, [pool], local=knobs.engine == "native") as cluster:  # our own decoder needs no process of its own
            for prefix, directory in models.items():
                spec = sampler_spec(job, directory, tokenizer_path, run, engine=knobs.engine, version=0, workers=1, length=length, trie=trie)
                group = cluster.start(spec)
                with cluster.phase(group, "evaluate"):
                    for name, asked in prompts.items():
                        rates, answers = pass_rates(
                            group, rewards, asked, 0, f"evaluate {name}", samples=knobs.samples, temperature=knobs.temperature,
                            max_new_tokens=knobs.max_new_tokens, max_no_result=max_no_result,
                        )  # fmt: skip
                        text = "".join(json.dumps(a, default=str) + "\n" for a in answers)
                        storage.write_text(str(run / "answers" / f"{prefix}{name}.jsonl"), text)
                        rates |= {metric: own_metric(metric, plug, answers) for metric, plug in knobs.metrics.items()}
                        metrics |= {f"{prefix}{name}/{key}": value for key, value in rates.items()}
    finally:
        if rewards:
            rewards.close()
    return metrics


def ranked(job: Job, run: Path) -> dict[str, float]:
    """How the trained model ranks a catalogue on each of `evaluate.ranking.sources` and, unless it began with random weights, the model that it
    started from, as `start/…`; the measures of each user are left in `run/ranked/`."""
    knobs = job.evaluate.ranking
    assert knobs is not None
    base = bridge.locate(job.model.path, job.model.revision, verify_up_to=job.verify_bytes)
    spec, base = extended(job.model, base, run, job.seed)
    tokenizer_path = tokenizer_directory(job, spec, base, run)
    tokenizer = Tokenizer.load(tokenizer_path)
    models = {"": run / "model"}
    if job.evaluate.start and job.model.init == "pretrained":
        models["start/"] = start_directory(spec, base, run, tokenizer_path, job.seed)
    prompts = held_out_prompts(knobs.sources, tokenizer, sys.maxsize)
    metrics: dict[str, float] = {}
    with joined(job.compute.device, job.compute.timeout_s, threads=job.compute.threads or default_threads(1)) as world:
        for prefix, directory in models.items():
            for name, asked in prompts.items():
                found = rank(
                    directory, tokenizer=tokenizer, prompts=asked, catalogue=knobs.catalogue, k=knobs.k, beam=knobs.beam, device=world.device,
                    parts=parts_of(unadapted(spec)), answers=run / "ranked" / f"{prefix}{name}.jsonl",
                )  # fmt: skip
                metrics |= {f"{prefix}{name}/{key}": value for key, value in found.items()}
    return metrics


def own_metric(name: str, plug: Plug, answers: Sequence[Mapping[str, Any]]) -> float:
    """What a function of the user's says of all answers. Raises UserError where it says nothing that is a number."""
    try:
        found = float(bind(plug)(answers))
    except ConfigError:
        raise
    except Exception as error:
        raise UserError(f"evaluate.metrics.{name}: {plug.use} failed: {type(error).__name__}: {error}") from error
    if not math.isfinite(found):
        raise UserError(f"evaluate.metrics.{name}: {plug.use} returned {found}")
    return found


def check(job: Job) -> None:
    """What can be known of the evaluation before anything is trained: that its plugs are there, and that `publish.metric` may be among what it finds.
    Raises ConfigError."""
    knobs = job.evaluate
    plugs = {"reward": knobs.reward, "engine": knobs.engine, **{f"metrics.{name}": plug for name, plug in knobs.metrics.items()}}
    for name, plug in plugs.items():
        if isinstance(plug, Plug):
            try:
                bind(plug)
            except ConfigError as error:
                raise ConfigError(f"evaluate.{name}: {error}") from None
    metric = job.publish.metric
    if metric is None or metric.startswith("train/"):
        return
    rates = ["pass@1", f"pass@{knobs.samples}", "reward", "no_result", *knobs.metrics]
    names = [f"{source}/{rate}" for source in knobs.sources for rate in rates]
    if knobs.ranking:
        names += [f"{source}/{task}/{measure}@{knobs.ranking.k}" for source in knobs.ranking.sources for task in TASKS for measure in MEASURES]
    held_out = [] if recipes.build(job).online else list(job.data.validation)
    if metric not in names and not any(metric.endswith(f"/{name}") for name in held_out):
        known = [*names, *(f"what the recipe says of {name}, like loss/{name}" for name in held_out)]
        raise ConfigError(f"publish.metric: the evaluation will have no {metric!r}; it will have {', '.join(known) or 'nothing'}")


def refuse_regression(metrics: Mapping[str, float], published: Mapping[str, float], metric: str, max_drop: float, mode: str = "max") -> None:
    """Raises UserError if `metric` is missing, and Worse if it is worse than what is published by more than `max_drop`; `mode` says which is better."""
    if metric not in metrics:
        raise UserError(f"publish.metric: the evaluation has no {metric!r}; it has {', '.join(sorted(metrics)) or 'nothing'}")
    before = published.get(metric)
    if before is not None and not (metrics[metric] - before) * (1 if mode == "max" else -1) >= -max_drop:
        raise Worse(f"not published: {metric} is {metrics[metric]:.4g}, the published version has {before:.4g} (publish.max_drop {max_drop:g})")
