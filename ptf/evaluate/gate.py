"""The gate: the comparison of a trained model with the model that training started from.

Both models are measured on the same held-out rows, and their values are compared row by row: an improvement is positive
if the trained model is better. The trained model is refused if the whole 95 % interval of the mean improvement is below
the limit, which is zero or, for `publish.metric`, −`publish.max_regression`; an interval that contains the limit does
not prevent publishing. `publish.max_regression` is in the unit of `publish.metric`, so the limit of default metrics is
zero. The comparison with the published version (ptf.publish.publishing) is another one: of two numbers, without an
interval, and with the same limit.

Each of `publish.guards` is compared in the same way, with its own limit. Where it begins with `baseline/NAME/`, the
trained model is compared with a baseline of the ranking (ptf.events.baselines), not with the starting model.

It imports no torch, because the first step of every flow that does work calls `check_evaluation`.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptf import storage
from ptf.artifact import START
from ptf.config import ConfigError, Job, Plugin
from ptf.config.plugin import bind
from ptf.config.recipes import algo_config
from ptf.config.sections.publish import is_error
from ptf.errors import UserError
from ptf.events.ranking_metrics import MEASURES, TASKS
from ptf.storage import file_verification

LOSSES = "held_out"  # directory in the run's: loss and denominator of each held-out sequence
RESPONSES = "responses"  # directory in the run's: the greedy responses of the evaluate stage, one line per prompt
BASELINE, BASELINES = "baseline/", "baselines"  # begins the names of baselines' metrics; their directory in RANKED
RANKED = "ranked"  # directory in the run's: the ranking metrics of each user, written by ptf.evaluate.measurement
AGAIN = "run the evaluate stage again"
METRIC_LIMIT, GUARDS, STARTING = "publish.max_regression", "publish.guards", "the starting model"
FEWEST = 5  # with fewer rows there is no interval
LEVEL = 0.975  # quantile at each end of a 95 % interval


class Worse(UserError):
    """The model is worse than the one that it was compared with, so it is not published."""


@dataclass(frozen=True)
class Comparison:
    """One metric before (`start`) and after (`now`) training.

    `low` and `high` are the ends of the 95 % interval of the improvement, which is negative if the metric became worse;
    they are infinite if there are too few rows.
    """

    metric: str
    rows: int
    start: float
    now: float
    low: float
    high: float
    allowed: float  # the regression that does not prevent publishing, in the unit of the metric
    key: str = METRIC_LIMIT  # what sets it
    against: str = STARTING

    @property
    def is_worse(self) -> bool:
        """Whether the upper end of the interval of the improvement is below `-allowed`."""
        return not self.high >= -self.allowed  # also if it is no number

    def describe(self) -> str:
        """Return both values, the interval and the verdict."""
        change = f"{self.metric} {self.start:.4g} of {self.against}, {self.now:.4g} of the trained one"
        if not self.rows:
            return f"{change}; not a mean over rows, so it has no interval"
        if math.isinf(self.low):
            return f"{change}; {self.rows} held-out items are too few for an interval"
        if self.is_worse:
            verdict = "worse"
        elif self.high < 0:
            verdict = f"worse, within {self.key}"
        else:
            verdict = "better" if self.low > 0 else "no significant difference"
        return (
            f"{change}; improvement {self.low:+.3g} to {self.high:+.3g} (95 % interval over {self.rows} held-out "
            f"items): {verdict}"
        )


def check_evaluation(job: Job) -> None:
    """Check the evaluation before anything is trained: that its plugins and baselines exist, and that it will measure
    `publish.metric` and `publish.guards`. Raises ConfigError."""
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
    section, ranking = job.evaluate, job.evaluate.ranking
    if ranking and ranking.baselines:
        from ptf.events.baselines import SIGNED, check  # needs the extra ptf[events]

        for name, settings in ranking.baselines.items():
            check(name, settings)
        if signed := [name for name in SIGNED if name in ranking.baselines and ranking.value_weight]:
            raise ConfigError(
                f"evaluate.ranking.baselines: {' and '.join(signed)} may have scores below 0, which have no logarithm "
                "for value_weight; remove it, or set value_weight: 0"
            )
    sampled = [f"pass@{section.samples}"] if section.samples > 1 else []
    metrics = ("greedy_pass_rate", "greedy_reward", "no_result_share", *sampled, *section.metrics)
    names, of_baselines = [f"{name}/{source}" for source in section.sources for name in metrics], list[str]()
    if ranking:
        measures = [f"{task}/{measure}@{ranking.k}" for task in TASKS for measure in MEASURES]
        ranked = [f"{measure}/{source}" for source in ranking.sources for measure in measures]
        names += ranked
        of_baselines = [f"{BASELINE}{name}/{one}" for name in ranking.baselines for one in ranked]
    held_out = [] if algo_config(job).online else list(job.data.validation)
    metric = job.publish.metric
    wanted = {"metric": metric} if metric is not None and not metric.startswith("train/") else {}
    for key, name in (*wanted.items(), *(("guards", name) for name in job.publish.guards)):
        measured = [*names, *(of_baselines if key == "guards" else ())]
        if name not in measured and name.partition("/")[2] not in held_out:
            known = [*measured, *(f"the recipe's metrics of {one}, for example loss/{one}" for one in held_out)]
            raise ConfigError(
                f"publish.{key}: the evaluation will have no {name!r}; it will have {', '.join(known) or 'nothing'}"
            )
    for name in job.publish.guards:
        why = "" if job.publish.measures_start else f"publish.gate: {job.publish.gate} does not measure it"
        if job.model.init != "pretrained" and name.startswith(tuple(f"{task}/" for task in TASKS)):
            why = "random weights are not ranked (model.init)"
        if why and not name.startswith(BASELINE):
            raise ConfigError(
                f"publish.guards: {name} cannot be compared with the starting model: {why}; remove it, or compare with "
                "one of evaluate.ranking.baselines: baseline/NAME/…"
            )


def comparisons(job: Job, run: Path, metrics: Mapping[str, float]) -> list[Comparison]:
    """Compare the trained model with the model that training started from.

    `publish.metric` is compared if it is set and was measured on both models. Otherwise it is the first of these that
    was measured on both: mean reward and pass rate of greedy responses, NDCG of the ranking, the held-out loss. Then
    come `publish.guards`. With `publish.gate: unmeasured` there are only those, with `off` nothing. Raises UserError if
    the stored rows of the two models are not the same rows, or a guard was not measured.
    """
    groups = ([str(job.publish.metric)], *defaults(job))
    measured = ([name for name in names if START + name in metrics] for names in groups)
    names = next(filter(None, measured), []) if job.publish.gate == "starting_model" else []
    guards = () if job.publish.gate == "off" else job.publish.guards
    return [
        *(_compared(job, run, name, metrics) for name in names),
        *(_compared(job, run, name, metrics, GUARDS) for name in guards),
    ]


def commit_rows(run: Path) -> None:
    """Commit the directories of rows; called after the evaluation has written all of them."""
    for place in (run / name for name in (LOSSES, RESPONSES, RANKED)):
        if place.is_dir():
            storage.commit(place, file_verification.of_run(place))


def defaults(job: Job) -> Iterator[list[str]]:
    """Yield groups of metrics that may be compared, in order of preference."""
    if _is_scored(job):
        yield [f"{rate}/{source}" for source in job.evaluate.sources for rate in ("greedy_reward", "greedy_pass_rate")]
    if ranking := job.evaluate.ranking:
        yield [f"all/ndcg@{ranking.k}/{source}" for source in ranking.sources]
    yield [f"{algo_config(job).held_out_metric}/{name}" for name in job.data.validation]


def unmeasured(job: Job, metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of `defaults` that an evaluation has not measured: on the trained model, or, unless
    `publish.gate` is `unmeasured`, on the one that training started from."""
    names = [name for group in defaults(job) for name in group]
    # random weights are not ranked
    both = [n for n in names if job.model.init == "pretrained" or not n.startswith("all/")]
    wanted = [*names, *(START + name for name in both if job.publish.measures_start)]
    wanted += [side for guard in job.publish.guards for side in _sides(guard)]
    return [name for name in dict.fromkeys(wanted) if name not in metrics]


def _is_scored(job: Job) -> bool:
    rollout = job.rollout
    return bool(job.evaluate.reward or (rollout and (rollout.reward or rollout.is_multi_turn)))


def needs_losses(job: Job) -> bool:
    """Return whether, by the config, the gate will compare the held-out loss of each row."""
    if job.publish.gate != "starting_model":
        return False
    metric = job.publish.metric
    if any(map(_is_loss, job.publish.guards)):
        return True
    if metric is not None and not metric.startswith("train/"):
        return _is_loss(metric)
    ranked = job.evaluate.ranking and job.model.init == "pretrained"
    return not ((job.evaluate.sources and _is_scored(job)) or ranked)


def _is_loss(metric: str | None) -> bool:
    return metric is not None and metric.startswith(("loss/", "kl/"))


def _compared(job: Job, run: Path, name: str, metrics: Mapping[str, float], key: str = METRIC_LIMIT) -> Comparison:
    """Compare one metric, or with the key `publish.guards` one of them.

    `publish.max_regression` is in the unit of `publish.metric`, and does not apply to the metrics that are compared in
    its place.
    """
    is_guard, is_named = key == GUARDS, name == job.publish.metric
    before, metric = _sides(name)
    if missing := [one for one in (before, metric) if one not in metrics]:
        raise UserError(f"{key}: the evaluation has not measured {' and '.join(missing)}; {AGAIN}")
    baseline = name.split("/")[1] if name.startswith(BASELINE) else ""
    less_is_better = is_error(metric) if is_guard or is_named else _is_loss(metric)
    allowed = job.publish.guards[name] if is_guard else job.publish.max_regression if is_named else 0.0
    start, now, sign = metrics[before], metrics[metric], -1.0 if less_is_better else 1.0
    rows = _rows(job, run, metric, f"{BASELINES}/{baseline}" if baseline else "start")
    low = high = sign * (now - start)
    if rows is not None:  # otherwise the metric is one number of all rows together
        then, after, denominators = np.array(rows, np.float64).reshape(-1, 3).T
        low, high = interval(sign * (after - then), denominators)
    return Comparison(metric, len(rows or ()), start, now, low, high, allowed, key, baseline or STARTING)


def _sides(name: str) -> tuple[str, str]:
    """Return the two metrics that are compared: that of the starting model or a baseline, and that of the new model."""
    return (name, name.split("/", 2)[2]) if name.startswith(BASELINE) else (START + name, name)


def _rows(job: Job, run: Path, metric: str, beside: str = "start") -> list[tuple[float, float, float]] | None:
    """Return the value of a metric at the start, the one now and their denominator, by row; None if the metric is not a
    mean over rows. `beside`: the directory of a ranking to compare with in place of the start's."""
    if _is_loss(metric):
        return [
            (a["value"], b["value"], b["denominator"]) for a, b in _both(run / LOSSES, metric.partition("/")[2])
        ] or None
    measure, _, source = metric.rpartition("/")
    if source in job.evaluate.sources and measure in ("greedy_reward", "greedy_pass_rate"):
        value = float if measure == "greedy_reward" else lambda reward: float(reward >= 1)
        rewards = [(a["reward"], b["reward"]) for a, b in _both(run / RESPONSES, source, "row")]
        return [(value(a), value(b), 1.0) for a, b in rewards if a is not None and b is not None]
    if job.evaluate.ranking and source in job.evaluate.ranking.sources:
        return [
            (a[measure], b[measure], 1.0)
            for a, b in _both(run / RANKED, source, "user", beside)
            if measure in a and measure in b
        ] or None
    return None


def _both(place: Path, source: str, key: str = "", beside: str = "start") -> list[tuple[dict, dict]]:
    """Return each row's record at the start together with its record now; none if the evaluation wrote none. Raises
    UserError if the rows differ."""
    if place.is_dir():
        file_verification.raise_if_different(str(place), file_verification.of_run(place), float("inf"), AGAIN)
    files = [place / prefix / f"{source}.jsonl" for prefix in (beside, "")]
    then, now = (
        [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else [] for file in files
    )
    if len(then) != len(now) or any(key and a[key] != b[key] for a, b in zip(then, now, strict=True)):
        raise UserError(f"{place.parent}: the two models were not measured on the same held-out rows; {AGAIN}")
    return list(zip(then, now, strict=True))


def interval(differences: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % interval of Σ differences / Σ denominators, a ratio of sums over rows (Cochran 1977,
    eq. 6.13), by Student's t. They are infinite if there are fewer than `FEWEST` rows."""
    n = len(differences)
    if n < FEWEST:
        return -math.inf, math.inf
    mean = differences.sum() / denominators.sum()
    spread = math.sqrt(n / (n - 1) * ((differences - mean * denominators) ** 2).sum()) / denominators.sum()
    return mean - quantile(n - 1) * spread, mean + quantile(n - 1) * spread


def quantile(freedom: int) -> float:
    """Return the `LEVEL` quantile of Student's t distribution with `freedom` degrees of freedom.

    Uses its expansion around the normal quantile (Abramowitz and Stegun 26.7.5): within 1 % from 4 degrees of freedom.
    """
    z, v = statistics.NormalDist().inv_cdf(LEVEL), freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / v**power for power, term in enumerate(terms))


def describe(job: Job, compared: Sequence[Comparison]) -> str:
    """Return the result of the gate as one line, for the console and the model card."""
    if compared and job.publish.gate != "off":
        return "; ".join(one.describe() for one in compared)
    why = f"publish.gate is {job.publish.gate}"
    if job.publish.gate == "starting_model":
        why = "nothing held out was measured on both models (evaluate.sources, evaluate.ranking, data.validation)"
    return f"not compared with what training started from: {why}"


def raise_if_worse(job: Job, compared: Sequence[Comparison]) -> None:
    """Raise Worse, which names the metrics that became worse, if the gate is on and any did."""
    worse = [one for one in compared if one.is_worse]
    if worse and job.publish.gate != "off":
        limits = dict.fromkeys(f"; allowed regression: {one.allowed:g} ({one.key})" for one in worse if one.allowed)
        than = dict.fromkeys("what training started from" if x.against == STARTING else x.against for x in worse)
        raise Worse(
            f"not published: worse than {' and '.join(than)}: {describe(job, worse)}{''.join(limits)}. "
            "publish.gate: off skips this comparison (a flow: run --continue RUN_NAME --set publish.gate=off); the "
            "checks of the exported files and against the published version remain"
        )
