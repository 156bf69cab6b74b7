"""Measurements of models: each function computes metrics, and writes their data into the run.

`ptf.evaluate.evaluation` is the stage that calls them: it holds the run's lease, retries, prints a table and records
the metrics.
"""

import importlib.util
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

from ptf import storage
from ptf.artifact import START
from ptf.compute.launch import default_threads, needs_ray
from ptf.compute.world import World, joined, pick_device
from ptf.config import ConfigError, Job, Plugin, dump, loads
from ptf.config.plugin import bind, own_copy
from ptf.config.recipes import algo_config
from ptf.data.document import PackUnit
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.evaluate import gate
from ptf.events.model_ranking import rank
from ptf.model.model import Model
from ptf.recipes import registry
from ptf.recipes.protocol import Recipe
from ptf.rl.cluster import Pool, RoleGroup
from ptf.rl.engines.vllm_support import config_of, installed_build, verdict_on
from ptf.rl.job_cluster import job_cluster
from ptf.rl.prompts import held_out_prompts
from ptf.rl.rewards.scoring import Rewards
from ptf.rl.rollout_role import evaluation_engine, evaluation_rewards, sampler_spec, trie_of
from ptf.rl.validate import affordable, pass_rates
from ptf.train.batch_sharding import deal
from ptf.train.components import layer_factory_of, without_adapters
from ptf.train.dataloading import held_out_sequences
from ptf.train.export import raise_if_damaged
from ptf.train.model_source import StartingModel, load_frozen_models
from ptf.train.validate import held_out_metrics, held_out_sequence_losses
from ptf.workspace import progress

COMPARED = "compared.json"  # in the run's directory


def measure_run(job: Job, run: Path) -> dict[str, float]:
    """Return the metrics of a run by name; those of the model that training started from begin with `starting_model/`.

    The rows that the gate compares are committed with them. Raises Corrupt if the files of the exported model changed.
    """
    raise_if_damaged(run, job.verify_bytes)
    metrics = measure_model(job, run)
    gate.commit_rows(run)
    return metrics


def measure_model(job: Job, run: Path) -> dict[str, float]:
    """Return all metrics of the model in `run/model`, by name. Raises UserError if two have one name."""
    metrics = measure_responses(job, run) | (measure_ranking(job, run) if job.evaluate.ranking else {})
    if not job.data.validation or algo_config(job).online:
        return metrics
    of_rows = measure_held_out_rows(job, run)
    if same := sorted(metrics.keys() & of_rows.keys()):
        raise UserError(
            f"evaluate.metrics: {', '.join(same)} is a metric of data.validation, too; give it another name"
        )
    return metrics | of_rows


def measure_held_out_rows(job: Job, run: Path) -> dict[str, float]:
    """Return the recipe's held-out metrics of the trained model on each set of `data.validation`.

    For pairs, it adds `length_baseline_accuracy`: the accuracy of always choosing the longer response. Unless
    `publish.gate` is `unmeasured`, it adds the metrics of the model that training started from. If the job's workers
    run on Ray, as many of them as in training measure the model; otherwise this process does.
    """
    compute = job.compute
    if needs_ray(compute) and not (compute.address or "").startswith("http"):
        from ptf.compute.gang import on_ray

        on_ray(measure_on_rank, (dump(job), str(run)), compute, run, "evaluate")
    else:
        measure_on_rank(dump(job), str(run))
    return read_row_metrics(run)


def read_row_metrics(run: Path) -> dict[str, float]:
    """Return the metrics that `measure_on_rank` wrote. Raises Corrupt if the file is not as this run wrote it."""
    return storage.read_record(str(run / COMPARED), gate.AGAIN, {"lineage": run.name})["metrics"]


def measure_on_rank(text: str, directory: str) -> None:
    """Measure held-out rows as one rank of a group; every rank calls it, with the job as YAML and the run's directory.

    The first rank writes the metrics into the directory.
    """
    job, run = loads(text), Path(directory)
    recipe, compute = registry.build(job).evaluated, job.compute
    starting = StartingModel.of_job(job, run)
    sets = held_out_sequences(
        job, recipe, starting.load_tokenizer(), run / "quarantine" if int(os.environ.get("RANK", 0)) == 0 else None
    )
    sizes = compute.mesh.sizes(compute.workers) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None
    with joined(compute.device, compute.timeout_s, sizes, compute.threads) as world:
        # for a few passes, without the parts that a run compiles or replaces
        plain = job.train.model_copy(update={"compile": False, "fused": []})
        model = starting.checkpoint(run / "model").load(world, plain, recipe.head, frozen=True)
        unadapted = replace(starting, section=without_adapters(starting.section))
        beside = load_frozen_models(recipe.frozen_models, job, unadapted, model, world)
        losses = run / gate.LOSSES if gate.needs_losses(job) else None
        metrics = measure_sequences(model, recipe, sets, job, world, beside, losses)
        if job.publish.measures_start:
            start = starting.checkpoint(world.together(starting.with_weights).directory)
            before, losses = start.load(world, plain, recipe.head, frozen=True), losses and losses / "start"
            of_start = measure_sequences(before, recipe, sets, job, world, beside, losses)
            metrics |= {START + name: value for name, value in of_start.items()}
        for name, sequences in sets.items():
            units = [unit for sequence in sequences for unit in sequence]
            if all(len(unit) == 2 for unit in units):  # pairs: how often the chosen response is longer, a tie as half
                trained = [(sample.loss_weights != 0).sum() for unit in units for sample in unit]
                chosen, rejected = np.array(trained, np.int64).reshape(-1, 2).T
                metrics[f"length_baseline_accuracy/{name}"] = float((np.sign(chosen - rejected) + 1).mean() / 2)
        if world.leads:
            storage.write_record(str(run / COMPARED), {"lineage": run.name, "metrics": metrics})


@torch.no_grad()
def measure_sequences(
    model: Model,
    recipe: Recipe,
    sets: Mapping[str, Sequence[Sequence[PackUnit]]],
    job: Job,
    world: World,
    beside: Mapping[str, Model],
    losses: Path | None,
) -> dict[str, float]:
    """Return the recipe's held-out metrics of one model on each set of sequences. Each sequence's loss and denominator
    are written into the directory `losses`, for the gate; None: they are not.

    With a `binary` reward model it adds the calibration error and the AUC of the scores, and as a baseline the AUC of
    the responses' lengths. A response counts as true if its label is above 0.5; there is no AUC if all or none are
    true.
    """
    micro_batch_sequences, seq_len = job.train.micro_batch_sequences, job.data.seq_len
    metrics = recipe.reported(held_out_metrics(model, recipe, sets, world, micro_batch_sequences, seq_len, beside))
    for name, sequences in sets.items() if losses else ():
        rows = held_out_sequence_losses(model, recipe, sequences, world, seq_len, beside)
        lines = [json.dumps({"value": value, "denominator": n}) + "\n" for value, n in rows.tolist()]
        if world.leads:
            storage.write_text(f"{losses}/{name}.jsonl", "".join(lines))
    if not recipe.scores_are_logits:
        return metrics
    for name, sequences in sets.items():
        batches = progress.counted(deal(sequences, world, micro_batch_sequences, seq_len), "scores", "batches")
        mine = np.concatenate([recipe.judgements(model, b.to(world.device)).cpu().numpy() for b in batches], axis=1)
        scores, truth, lengths = np.concatenate(world.gather_data(mine), axis=1)  # [responses], of every rank
        metrics[f"calibration_error/{name}"] = calibration_error(1 / (1 + np.exp(-scores)), truth)
        if 0 < (truth > 0.5).sum() < len(truth):  # AUC needs both true and false responses
            metrics |= {
                f"auc/{name}": auc(scores, truth > 0.5),
                f"length_baseline_auc/{name}": auc(lengths, truth > 0.5),
            }
    return metrics


def auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """Return the area under the ROC curve: the probability that a true response scores more than a false one, where
    equal scores count half (Mann and Whitney 1947).

    `scores`, `truth`: [responses]; there must be a true and a false response.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    true, false = int(truth.sum()), int((~truth).sum())
    return float((ranks[truth].sum() - true * (true + 1) / 2) / (true * false))


def calibration_error(probabilities: np.ndarray, truth: np.ndarray, bins: int = 10) -> float:
    """Return the expected calibration error (Guo et al. 2017, eq. 3): the absolute difference between the mean
    probability and the share of true responses in each of `bins` equal intervals, averaged over responses."""
    inside = np.minimum((probabilities * bins).astype(int), bins - 1)
    return sum(abs(float((probabilities - truth)[inside == b].sum())) for b in range(bins)) / len(truth)


def _engine_here(job: Job, model: Path) -> str | Plugin:
    """Return the engine that generates held-out responses on this machine, and print its name."""
    gpu = pick_device(job.compute.device).type == "cuda"
    wrong, _ = verdict_on(config_of(model), job.train.precision, installed_build(), synced=False)
    engine = evaluation_engine(job, gpu, importlib.util.find_spec("vllm") is not None, bool(wrong))
    why = f" ({wrong})" if wrong and gpu and job.evaluate.engine == "auto" else ""
    print(f"evaluate: engine={engine.use if isinstance(engine, Plugin) else engine}{why}", flush=True)
    return engine


def measure_responses(job: Job, run: Path) -> dict[str, float]:
    """Return the greedy pass rate, pass@k and the mean reward of the trained model on each of `evaluate.sources`;
    unless `publish.gate` is `unmeasured`, also those of the model that training started from.

    The greedy responses are written to `run/responses/` and `run/responses/start/`.
    """
    rewards = evaluation_rewards(job)
    if not job.evaluate.sources or not (rewards or (job.rollout and job.rollout.is_multi_turn)):
        return {}
    starting = StartingModel.of_job(job, run)
    tokenizer_path, tokenizer = starting.tokenizer_path, starting.load_tokenizer()
    prompts = held_out_prompts(job.evaluate.sources, tokenizer, job.evaluate.prompts)
    trie = trie_of(job.rollout, tokenizer)
    models = {"": run / "model"}  # prefix of its metrics → directory
    if job.publish.measures_start:
        models[START] = starting.with_weights().directory
    prompts, job = affordable(prompts, job, run / "model", len(models))
    metrics: dict[str, float] = {}
    length = job.evaluate.max_new_tokens + max(
        len(prompt.tokens) for of_source in prompts.values() for prompt in of_source
    )
    if job.rollout and job.rollout.is_multi_turn:
        length = max(length, job.data.seq_len)
    try:
        pool = Pool("rollout", frozenset({"rollout"}), (len(models),))
        engine = _engine_here(job, run / "model")
        # the native engine runs in this process
        with job_cluster(job, run, [pool], local=engine == "native") as cluster:
            for prefix, directory in models.items():
                group = cluster.start(
                    sampler_spec(job, directory, tokenizer_path, run, trie, engine=engine, length=length)
                )
                with cluster.phase(group, "evaluate"):
                    for name, source_prompts in prompts.items():
                        file = run / gate.RESPONSES / ("start" if prefix else "") / f"{name}.jsonl"
                        found = measure_responses_to(job, name, source_prompts, group, rewards, file)
                        metrics |= {f"{prefix}{key}/{name}": value for key, value in found.items()}
    finally:
        rewards.close()
    return metrics


def measure_responses_to(
    job: Job, source: str, prompts: Sequence[Prompt], rollout: RoleGroup, rewards: Rewards, file: Path
) -> dict[str, float]:
    """Return the pass rates of a model's responses to the prompts of a source, and `evaluate.metrics` of its greedy
    responses, which are written to `file`."""
    metrics, responses = pass_rates(
        rollout,
        rewards,
        prompts,
        0,
        f"evaluate {source}",
        samples=job.evaluate.samples,
        temperature=job.evaluate.temperature,
        max_new_tokens=job.evaluate.max_new_tokens,
        max_no_result_share=job.rollout.max_no_result_share if job.rollout else 0.1,
    )
    storage.write_text(str(file), "".join(json.dumps(a, default=str) + "\n" for a in responses))
    return metrics | {
        name: compute_own_metric(name, plugin, responses) for name, plugin in job.evaluate.metrics.items()
    }


def measure_ranking(job: Job, run: Path) -> dict[str, float]:
    """Return the ranking metrics of the trained model on each of `evaluate.ranking.sources`; unless
    `publish.gate` is `unmeasured` or its weights were random, also those of the model that training started from; and
    those of `evaluate.ranking.baselines`.

    The metrics of each user are written to `run/ranked/`, `run/ranked/start/` and `run/ranked/baselines/NAME/`.
    """
    evaluate_config = job.evaluate.ranking
    assert evaluate_config is not None
    starting = StartingModel.of_job(job, run)
    tokenizer = starting.load_tokenizer()
    models = {"": run / "model"}  # prefix of its metrics → directory
    if job.publish.measures_start and job.model.init == "pretrained":
        models[START] = starting.with_weights().directory
    prompts = held_out_prompts(evaluate_config.sources, tokenizer, sys.maxsize)
    metrics: dict[str, float] = {}
    with joined(job.compute.device, job.compute.timeout_s, threads=job.compute.threads or default_threads(1)) as world:
        for prefix, directory in models.items():
            for name, source_prompts in prompts.items():
                ranking = rank(
                    directory,
                    tokenizer=tokenizer,
                    prompts=source_prompts,
                    catalogue=evaluate_config.catalogue,
                    k=evaluate_config.k,
                    value_weight=evaluate_config.value_weight,
                    device=world.device,
                    factory=layer_factory_of(without_adapters(starting.section)),
                    answers=run / gate.RANKED / ("start" if prefix else "") / f"{name}.jsonl",
                )
                metrics |= {f"{prefix}{key}/{name}": value for key, value in ranking.items()}
    if evaluate_config.baselines:
        from ptf.events.baseline_ranking import rank_baselines  # needs the extra ptf[events]

        metrics |= rank_baselines(evaluate_config, prompts, run / gate.RANKED / gate.BASELINES)
    return metrics


def compute_own_metric(name: str, plugin: Plugin, responses: Sequence[Mapping[str, Any]]) -> float:
    """Return the value of a user's metric (`evaluate.metrics`), computed from all responses to the prompts of a source.

    Raises UserError if the function fails, or if its value is not finite.
    """
    try:
        value = float(bind(plugin)(own_copy(responses)))
    except ConfigError:
        raise
    except Exception as error:
        raise UserError(f"evaluate.metrics.{name}: {plugin.use} failed: {type(error).__name__}: {error}") from error
    if not math.isfinite(value):
        raise UserError(f"evaluate.metrics.{name}: {plugin.use} returned {value}")
    return value
