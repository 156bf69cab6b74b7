"""A sweep: the same job several times with other values of some keys, and the best of them by `publish.metric`."""

import json
import math
from collections.abc import Mapping, Sequence

from ptf.config import ConfigError, Job, dump, loads
from ptf.errors import UserError

FIXED = ("output", "publish", "flow", "evaluate", "data.validation")  # what makes trials comparable


def trials(job: Job) -> list[str]:
    """The jobs of `flow.sweep`, each whole. Raises UserError, before any runs, for one that is no job or that could not be compared with the others."""
    if len(job.flow.sweep) < 2:
        raise UserError("flow.sweep: a sweep has two trials at least, like [{train.lr: 1e-4}, {train.lr: 3e-4}]")
    if not job.publish.metric:
        raise UserError("publish.metric: a sweep chooses by a metric of the evaluate stage; name it")
    found = []
    for number, changes in enumerate(job.flow.sweep):
        for key in changes:
            if any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED):
                raise UserError(f"flow.sweep[{number}]: {key} must be the same in all trials")
        try:
            found.append(dump(loads(dump(job), [f"{key}={json.dumps(value)}" for key, value in changes.items()])))
        except ConfigError as error:
            raise UserError(f"flow.sweep[{number}]: {error}") from None
    return found


def best(job: Job, metrics: Sequence[Mapping[str, float]]) -> int:
    """Which of the trials it is; prints all. Raises UserError where none has the metric."""
    name, sign = str(job.publish.metric), 1 if job.publish.mode == "max" else -1
    values = [trial.get(name, math.nan) for trial in metrics]
    if all(map(math.isnan, values)):
        there = sorted({key for trial in metrics for key in trial})
        raise UserError(f"publish.metric: no trial's evaluation has {name!r}; there are {', '.join(there) or 'none'}")
    chosen = max((i for i, value in enumerate(values) if not math.isnan(value)), key=lambda i: sign * values[i])
    for i, (changes, value) in enumerate(zip(job.flow.sweep, values, strict=True)):
        print(f"{'→' if i == chosen else ' '} {name} {value:8.4g}  {changes}", flush=True)
    return chosen
