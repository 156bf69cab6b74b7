"""What can be said of an evaluation before anything is trained.

It imports no torch: the first step of a flow with work to do calls it.
"""

from ptf.config import ConfigError, Job
from ptf.config.plugin import bind
from ptf.config.section import Plug
from ptf.events.ranking_metrics import MEASURES, TASKS
from ptf.recipes import registry


def check_evaluation(job: Job) -> None:
    """Check the evaluation before anything is trained: that its plugins exist, and that it will measure
    `publish.metric`. Raises ConfigError."""
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
            f"{source}/{task}/{measure_model}@{knobs.ranking.k}"
            for source in knobs.ranking.sources
            for task in TASKS
            for measure_model in MEASURES
        ]
    held_out = [] if registry.build(job).online else list(job.data.validation)
    if metric not in names and not any(metric.endswith(f"/{name}") for name in held_out):
        known = [*names, *(f"what the recipe measures on {name}, like loss/{name}" for name in held_out)]
        raise ConfigError(
            f"publish.metric: the evaluation will have no {metric!r}; it will have {', '.join(known) or 'nothing'}"
        )
