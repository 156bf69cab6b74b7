"""A sweep: trials of one job with different values of some keys, of which `publish.metric` determines the best."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.config import ConfigError, Job, dump, loads
from ptf.errors import UserError


def measured_by(job: Job) -> dict[str, Any]:
    """Return, by key, the settings that must be the same in all trials: those of measurement and publication."""
    rollout = job.rollout
    return {
        "recipe": job.recipe,
        "output": job.output,
        "publish": job.publish,
        "flow": job.flow,
        "evaluate": job.evaluate.model_dump(),
        "data.validation": job.data.validation,
        "data.prepare": job.data.prepare,
        "data.seq_len": job.data.seq_len,
        "the reward": job.evaluate.reward or (rollout and rollout.reward),
        "rollout.environment": rollout and rollout.environment,
        "rollout.play": rollout and rollout.play,
        "rollout.harness": rollout and rollout.harness,
    }


def trials(job: Job) -> list[str]:
    """Return the jobs of `flow.sweep`, each as a complete text.

    Raises UserError if a trial is not a valid job, or if its metric could not be compared with that of the others.
    """
    if len(job.flow.sweep) < 2:
        raise UserError("flow.sweep: a sweep needs at least two trials, like [{train.lr: 1e-4}, {train.lr: 3e-4}]")
    if not job.publish.metric or job.publish.metric.startswith("train/"):
        raise UserError("publish.metric: a sweep chooses the best trial by a metric of the evaluate stage; name one")
    texts = []
    for number, changes in enumerate(job.flow.sweep):
        try:
            trial = loads(dump(job), [f"{key}={json.dumps(value)}" for key, value in changes.items()])
        except ConfigError as error:
            raise UserError(f"flow.sweep[{number}]: {error}") from None
        here = measured_by(trial)
        if other := [key for key, value in measured_by(job).items() if here[key] != value]:
            raise UserError(
                f"flow.sweep[{number}]: {', '.join(other)} must be the same in all trials, or they cannot be compared"
            )
        texts.append(dump(trial))
    return texts


def best(job: Job, metrics: Sequence[Mapping[str, float]]) -> int:
    """Return the number of the best trial, and print the metric of all. Raises UserError if no trial has the metric."""
    name, sign = str(job.publish.metric), -1 if job.publish.less_is_better else 1
    values = [trial.get(name, math.nan) for trial in metrics]
    if all(map(math.isnan, values)):
        there = sorted({key for trial in metrics for key in trial})
        raise UserError(f"publish.metric: no trial's evaluation has {name!r}; there are {', '.join(there) or 'none'}")
    chosen = max((i for i, value in enumerate(values) if not math.isnan(value)), key=lambda i: sign * values[i])
    for i, (changes, value) in enumerate(zip(job.flow.sweep, values, strict=True)):
        print(f"{'→' if i == chosen else ' '} {name} {value:8.4g}  {changes}", flush=True)
    return chosen
