"""Measurements of a trained model: how often its answers to held-out prompts are right; or, of a model that compares or
scores answers, how well it does that on held-out ones."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ptf import gate, storage
from ptf.compute.launch import default_threads, needs_ray, on_ray
from ptf.compute.world import World, joined
from ptf.config import ConfigError, Job, dump, loads
from ptf.config.plugin import bind
from ptf.config.section import Plug
from ptf.data.sample import PackUnit, Sample
from ptf.errors import UserError
from ptf.events.model_ranking import TASKS, rank
from ptf.events.ranking_metrics import MEASURES
from ptf.gate import Worse
from ptf.model.decoder import Decoder
from ptf.recipes import registry
from ptf.recipes.protocol import Recipe, ScoringRecipe, as_evaluated, as_reported
from ptf.rl.cluster import Pool
from ptf.rl.job_cluster import job_cluster
from ptf.rl.prompts import held_out_prompts
from ptf.rl.rollout_role import rewards_of, sampler_spec, trie_of
from ptf.rl.validate import pass_rates
from ptf.train.batch_sharding import deal
from ptf.train.companions import companions, exported
from ptf.train.components import parts_of, without_adapters
from ptf.train.dataloading import held_out_rows
from ptf.train.export import refuse_damaged
from ptf.train.starting_model import StartingModel
from ptf.train.trainer import load_model
from ptf.train.validate import held_out_loss, held_out_losses

COMPARED = "compared.json"  # in the run's directory


def evaluate(job: Job, run: Path) -> dict[str, float]:
    """Return the metrics of a run by name; `start/…` is of the model that training started from. Raises Corrupt where
    the exported model is not what was written."""
    refuse_damaged(run, job.verify_bytes)
    found = measure(job, run)
    gate.commit_rows(run)
    return found


def measure(job: Job, run: Path) -> dict[str, float]:
    """Return all metrics of the model in `run/model`, by name."""
    found = generated(job, run) | (ranked(job, run) if job.evaluate.ranking else {})
    found |= compared(job, run) if job.data.validation and not registry.build(job).online else {}
    return found


def compared(job: Job, run: Path) -> dict[str, float]:
    """Return what the recipe measures on each of `data.validation`, of the trained model, and beside it what answers'
    lengths alone would give. Of scores from 0 to 1, the area under the ROC curve and the calibration error too. By as
    many workers as trained it where that was on Ray, else in this process."""
    compute = job.compute
    if needs_ray(compute) and not (compute.address or "").startswith("http"):
        on_ray(
            compare,
            (dump(job), str(run)),
            workers=compute.workers,
            device=compute.device,
            threads=compute.threads,
            address=compute.address,
            workdir=run,
            timeout_s=compute.timeout_s,
            label="evaluate",
        )
    else:
        compare(dump(job), str(run))
    return read_compared(run)


def read_compared(run: Path) -> dict[str, float]:
    """Return the metrics that `compare` wrote. Raises Corrupt."""
    return storage.record(str(run / COMPARED), gate.AGAIN, {"lineage": run.name})["metrics"]


def compare(text: str, directory: str) -> None:
    """Measure on one rank of all; the first rank writes the metrics into the run's directory."""
    job, run = loads(text), Path(directory)
    recipe, compute = as_evaluated(registry.build(job)), job.compute
    starting = StartingModel.of(job, run)
    spec, tokenizer_path = starting.section, starting.tokenizer_path
    sets = held_out_rows(
        job, recipe, starting.load_tokenizer(), run / "quarantine" if int(os.environ.get("RANK", 0)) == 0 else None
    )
    metrics: dict[str, float] = {}
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    mesh = (1, 1) if alone else (compute.mesh.replicate, compute.mesh.tensor)
    with joined(compute.device, compute.timeout_s, mesh[0], compute.threads, mesh[1]) as world:

        def load(place):
            return load_model(
                place, world, exported(spec, place), seed=job.seed, precision=job.train.precision, head=recipe.head
            )[0]

        model = load(run / "model")
        beside = companions(
            recipe.companions, job, world, world, model, without_adapters(spec), starting.directory, run, tokenizer_path
        )
        metrics |= measured(model, recipe, sets, job, world, beside)
        by_row = gate.needs_losses(job)
        if by_row:
            leave_losses(model, recipe, sets, job, world, beside, run / gate.ROWS)
        if job.evaluate.start:
            place = world.share(str(starting.with_weights()) if world.leads else None)
            before = load(Path(str(place)))
            metrics |= {
                f"start/{name}": value for name, value in measured(before, recipe, sets, job, world, beside).items()
            }
            if by_row:
                leave_losses(before, recipe, sets, job, world, beside, run / gate.ROWS / "start")
        for name, rows in sets.items():
            atoms = [atom for row in rows for atom in row]
            if all(len(atom) == 2 for atom in atoms):
                longer = np.array(
                    [np.sign(answer_length(chosen) - answer_length(rejected)) for chosen, rejected in atoms]
                )
                metrics[f"accuracy_by_length/{name}"] = float((longer + 1).mean() / 2)  # of equally long ones, half
        if world.leads:
            storage.write_record(str(run / COMPARED), {"lineage": run.name, "metrics": metrics})


def measured(
    model: Decoder,
    recipe: Recipe,
    sets: Mapping[str, Sequence[Sequence[PackUnit]]],
    job: Job,
    world: World,
    beside: Mapping[str, Decoder],
) -> dict[str, float]:
    """Return what the recipe measures of one model; of scores from 0 to 1, how well it tells those above 0.5 from the
    others too, and what lengths alone would."""
    micro_rows, width = job.train.micro_sequences, job.data.seq_len
    found = as_reported(recipe, held_out_loss(model, recipe, sets, world, micro_rows, width, beside))
    if not getattr(recipe, "is_probability", False):
        return found
    recipe = cast(ScoringRecipe, recipe)
    for name, rows in sets.items():
        scores, truth, lengths = scored(model, recipe, rows, world, micro_rows, width)
        found[f"calibration_error/{name}"] = calibration_error(1 / (1 + np.exp(-scores)), truth)
        if 0 < (truth > 0.5).sum() < len(truth):  # it is the order of two kinds
            found |= {f"auc/{name}": auc(scores, truth > 0.5), f"auc_by_length/{name}": auc(lengths, truth > 0.5)}
    return found


def leave_losses(
    model: Decoder,
    recipe: Recipe,
    sets: Mapping[str, Sequence[Sequence[PackUnit]]],
    job: Job,
    world: World,
    beside: Mapping[str, Decoder],
    place: Path,
) -> None:
    """Write the loss of each held-out row for the gate, in files that are alike for every model."""
    for name, rows in sets.items():
        found = held_out_losses(model, recipe, rows, world, job.data.seq_len, beside)
        if world.leads:
            lines = [
                json.dumps({"value": value, "denominator": denominator}) + "\n" for value, denominator in found.tolist()
            ]
            storage.write_text(str(place / f"{name}.jsonl"), "".join(lines))


def answer_length(sample: Sample) -> int:
    """Return the number of tokens that are trained."""
    return int((sample.weights != 0).sum())


@torch.no_grad()
def scored(
    model: Decoder, recipe: ScoringRecipe, rows: Sequence[Sequence[PackUnit]], world: World, micro_rows: int, width: int
) -> np.ndarray:
    """Return scores, rewards and lengths of all answers, on every rank: [3, answers]."""
    found = []
    for batch in deal(rows, world, micro_rows, width):
        batch = batch.to(world.device)
        found.append(recipe.judgements(model, batch).cpu().numpy())
    mine = np.concatenate(found, axis=1)
    # a tensor group has the same
    return np.concatenate([mine for rank, mine in enumerate(world.gather(mine)) if rank % world.tensor == 0], axis=1)


def auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """Return the chance that a true one scores more than a false one, half of it where they score the same (Mann and
    Whitney 1947). Both kinds must be there."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    true, false = int(truth.sum()), int((~truth).sum())
    return float((ranks[truth].sum() - true * (true + 1) / 2) / (true * false))


def calibration_error(probabilities: np.ndarray, truth: np.ndarray, bins: int = 10) -> float:
    """Return the mean over answers of how far, in each of `bins` equal intervals, the mean probability is from the
    share that is true (Guo et al. 2017, eq. 3)."""
    inside = np.minimum((probabilities * bins).astype(int), bins - 1)
    gaps = [abs(float((probabilities - truth)[inside == b].sum())) for b in range(bins)]
    return sum(gaps) / len(truth)


def generated(job: Job, run: Path) -> dict[str, float]:
    """pass@1, pass@k and mean reward on each of `evaluate.sources`, of the trained model and, as `start/…`, of the
    model it started from. The greedy answers are left in `run/answers/`, those of the start in `run/answers/start/`."""
    knobs = job.evaluate
    rewards = rewards_of(job, knobs.reward or (job.rollout.reward if job.rollout else None))
    if not knobs.sources or not (rewards or (job.rollout and job.rollout.environment)):
        return {}
    starting = StartingModel.of(job, run)
    tokenizer_path, tokenizer = starting.tokenizer_path, starting.load_tokenizer()
    prompts, trie = held_out_prompts(job.evaluate.sources, tokenizer, knobs.limit), trie_of(job.rollout, tokenizer)
    models = {"": run / "model"} | ({"start/": starting.with_weights()} if knobs.start else {})
    metrics: dict[str, float] = {}
    length = max(len(p.tokens) for asked in prompts.values() for p in asked) + knobs.max_new_tokens
    if job.rollout and job.rollout.environment:
        length = max(length, job.data.seq_len)
    max_no_result = job.rollout.max_no_result if job.rollout else 0.1
    try:
        pool = Pool("rollout", frozenset({"rollout"}), (len(models),))
        # our own decoder needs no process of its own
        with job_cluster(job, run, [pool], local=knobs.engine == "native") as cluster:
            for prefix, directory in models.items():
                spec = sampler_spec(
                    job,
                    directory,
                    tokenizer_path,
                    run,
                    engine=knobs.engine,
                    version=0,
                    workers=1,
                    length=length,
                    trie=trie,
                )
                group = cluster.start(spec)
                with cluster.phase(group, "evaluate"):
                    for name, asked in prompts.items():
                        rates, answers = pass_rates(
                            group,
                            rewards,
                            asked,
                            0,
                            f"evaluate {name}",
                            samples=knobs.samples,
                            temperature=knobs.temperature,
                            max_new_tokens=knobs.max_new_tokens,
                            max_no_result=max_no_result,
                        )
                        text = "".join(json.dumps(a, default=str) + "\n" for a in answers)
                        storage.write_text(str(run / "answers" / f"{prefix}{name}.jsonl"), text)
                        rates |= {metric: own_metric(metric, plug, answers) for metric, plug in knobs.metrics.items()}
                        metrics |= {f"{prefix}{name}/{key}": value for key, value in rates.items()}
    finally:
        if rewards:
            rewards.close()
    return metrics


def ranked(job: Job, run: Path) -> dict[str, float]:
    """How the trained model ranks a catalogue on each of `evaluate.ranking.sources` and, unless it began with random
    weights, the model that it started from, as `start/…`; the measures of each user are left in `run/ranked/`."""
    knobs = job.evaluate.ranking
    assert knobs is not None
    starting = StartingModel.of(job, run)
    tokenizer = starting.load_tokenizer()
    models = {"": run / "model"}
    if job.evaluate.start and job.model.init == "pretrained":
        models["start/"] = starting.with_weights()
    prompts = held_out_prompts(knobs.sources, tokenizer, sys.maxsize)
    metrics: dict[str, float] = {}
    with joined(job.compute.device, job.compute.timeout_s, threads=job.compute.threads or default_threads(1)) as world:
        for prefix, directory in models.items():
            for name, asked in prompts.items():
                found = rank(
                    directory,
                    tokenizer=tokenizer,
                    prompts=asked,
                    catalogue=knobs.catalogue,
                    k=knobs.k,
                    beam=knobs.beam,
                    device=world.device,
                    parts=parts_of(without_adapters(starting.section)),
                    answers=run / "ranked" / f"{prefix}{name}.jsonl",
                )
                metrics |= {f"{prefix}{name}/{key}": value for key, value in found.items()}
    return metrics


def own_metric(name: str, plug: Plug, answers: Sequence[Mapping[str, Any]]) -> float:
    """Return what a function of the user's makes of all answers. Raises UserError where that is no number."""
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
    """Check what can be known of the evaluation before anything is trained: that its plugins are there, and that
    `publish.metric` may be among what it measures. Raises ConfigError."""
    knobs = job.evaluate
    plugs = {
        "reward": knobs.reward,
        "engine": knobs.engine,
        **{f"metrics.{name}": plug for name, plug in knobs.metrics.items()},
    }
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
        names += [
            f"{source}/{task}/{measure}@{knobs.ranking.k}"
            for source in knobs.ranking.sources
            for task in TASKS
            for measure in MEASURES
        ]
    held_out = [] if registry.build(job).online else list(job.data.validation)
    if metric not in names and not any(metric.endswith(f"/{name}") for name in held_out):
        known = [*names, *(f"what the recipe says of {name}, like loss/{name}" for name in held_out)]
        raise ConfigError(
            f"publish.metric: the evaluation will have no {metric!r}; it will have {', '.join(known) or 'nothing'}"
        )


def refuse_regression(
    metrics: Mapping[str, float], published: Mapping[str, float], metric: str, max_drop: float, mode: str = "max"
) -> None:
    """Raise UserError if `metric` is missing, and Worse if it is worse than what is published by more than `max_drop`;
    `mode` says which is better."""
    if metric not in metrics:
        raise UserError(
            f"publish.metric: the evaluation has no {metric!r}; it has {', '.join(sorted(metrics)) or 'nothing'}"
        )
    before = published.get(metric)
    if before is not None and not (metrics[metric] - before) * (1 if mode == "max" else -1) >= -max_drop:
        raise Worse(
            f"not published: {metric} is {metrics[metric]:.4g}, the published version has {before:.4g} "
            f"(publish.max_drop {max_drop:g})"
        )
