"""What can be said of an evaluation before anything is trained.

It imports no torch: the first step of a flow with work to do calls it.
"""

from ptf.config import ConfigError, Job
from ptf.config.plugin import bind
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
    rates = ["pass@1", f"pass@{evaluate_config.samples_per_prompt}", "reward", "no_result", *evaluate_config.metrics]
    names = [f"{source}/{rate}" for source in evaluate_config.sources for rate in rates]
    if evaluate_config.ranking:
        names += [
            f"{source}/{task}/{measure}@{evaluate_config.ranking.k}"
            for source in evaluate_config.ranking.sources
            for task in TASKS
            for measure in MEASURES
        ]
    held_out = [] if registry.is_online(job) else list(job.data.validation)
    if metric not in names and not any(metric.endswith(f"/{name}") for name in held_out):
        known = [*names, *(f"the recipe's metrics of {name}, for example loss/{name}" for name in held_out)]
        raise ConfigError(
            f"publish.metric: the evaluation will have no {metric!r}; it will have {', '.join(known) or 'nothing'}"
        )
