"""Checks of an evaluation before anything is trained.

It imports no torch, because the first step of every flow that does work calls it.
"""

from collections.abc import Mapping

from ptf.config import ConfigError, Job
from ptf.config.plugin import bind
from ptf.config.renames import METRICS
from ptf.config.section import Plugin
from ptf.events.ranking_metrics import MEASURES, TASKS
from ptf.recipes import registry


def check_evaluation(job: Job) -> None:
    """Check the evaluation before anything is trained: that its plugins exist, and that it will measure
    `publish.metric`. Raises ConfigError."""
    evaluate_config = job.evaluate
    plugins = {
        "reward": evaluate_config.reward,
        "engine": evaluate_config.engine,
        **{f"metrics.{name}": plugin for name, plugin in evaluate_config.metrics.items()},
    }
    for name, plugin in plugins.items():
        if isinstance(plugin, Plugin):
            try:
                bind(plugin)
            except ConfigError as error:
                raise ConfigError(f"evaluate.{name}: {error}") from None
    metric = job.publish.metric
    if metric is None or metric.startswith("train/"):
        return
    current = former_names(job)
    names = list(dict.fromkeys(current.values()))
    if metric in current and metric not in names:
        raise ConfigError(f"publish.metric: {metric} is now {current[metric]}")
    held_out = [] if registry.is_online(job) else list(job.data.validation)
    if metric not in names and metric.partition("/")[2] not in held_out:
        known = [*names, *(f"the recipe's metrics of {name}, for example loss/{name}" for name in held_out)]
        raise ConfigError(
            f"publish.metric: the evaluation will have no {metric!r}; it will have {', '.join(known) or 'nothing'}"
        )


def former_names(job: Job) -> dict[str, str]:
    """Return the names that metrics of responses and rankings had in earlier versions, each with the name that it has
    now, METRIC/NAME: they were NAME/METRIC, and some had other names before and after that."""
    evaluate_config, ranking = job.evaluate, job.evaluate.ranking
    sampled = [f"pass@{evaluate_config.samples}"] if evaluate_config.samples > 1 else []
    names = {
        former: f"{now}/{source}"
        for source in evaluate_config.sources
        for rate, now in METRICS.items()
        for former in (f"{source}/{rate}", f"{rate}/{source}")
    }
    pairs = [(source, rate) for source in evaluate_config.sources for rate in (*sampled, *evaluate_config.metrics)]
    if ranking:
        measures = [f"{task}/{measure}@{ranking.k}" for task in TASKS for measure in MEASURES]
        pairs += [(source, measure) for source in ranking.sources for measure in measures]
    return names | {f"{source}/{metric}": f"{metric}/{source}" for source, metric in pairs}


def with_current_names(job: Job, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation, which an earlier version may have stored, under the names of today."""
    former = former_names(job)

    def current(name: str) -> str:
        if name.startswith(("start/", "starting_model/")):  # of the model that training started from
            old = name.partition("/")[2]
            return f"starting_model/{former.get(old, old)}"
        return former.get(name, name)

    return {current(name): value for name, value in metrics.items()}
