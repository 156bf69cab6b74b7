"""Checks of an evaluation before anything is trained.

It imports no torch, because the first step of every flow that does work calls it.
"""

from ptf.config import ConfigError, Job, Plugin
from ptf.config.plugin import bind
from ptf.config.recipes import algo_config
from ptf.events.ranking_metrics import MEASURES, TASKS


def check_evaluation(job: Job) -> None:
    """Check the evaluation before anything is trained: that its plugins exist, and that it will measure
    `publish.metric`. Raises ConfigError."""
    plugins = {
        "reward": job.evaluate.reward,
        "engine": job.evaluate.engine,
        **{f"metrics.{name}": plugin for name, plugin in job.evaluate.metrics.items()},
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
    names = _of_responses_and_rankings(job)
    held_out = [] if algo_config(job).online else list(job.data.validation)
    if metric not in names and metric.partition("/")[2] not in held_out:
        known = [*names, *(f"the recipe's metrics of {name}, for example loss/{name}" for name in held_out)]
        raise ConfigError(
            f"publish.metric: the evaluation will have no {metric!r}; it will have {', '.join(known) or 'nothing'}"
        )


def _of_responses_and_rankings(job: Job) -> list[str]:
    """Return the names of the metrics of responses and of rankings that the evaluation will have, METRIC/SOURCE."""
    evaluate_config, ranking = job.evaluate, job.evaluate.ranking
    sampled = [f"pass@{evaluate_config.samples}"] if evaluate_config.samples > 1 else []
    metrics = ("greedy_pass_rate", "greedy_reward", "no_result_share", *sampled, *evaluate_config.metrics)
    names = [f"{metric}/{source}" for source in evaluate_config.sources for metric in metrics]
    if ranking:
        measures = [f"{task}/{measure}@{ranking.k}" for task in TASKS for measure in MEASURES]
        names += [f"{measure}/{source}" for source in ranking.sources for measure in measures]
    return names
