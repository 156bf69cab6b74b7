"""The gate: the comparison of a trained model with the model that training started from.

Both models are measured on the same held-out rows, and their values are compared row by row: an improvement is positive
if the trained model is better. The trained model is refused if the whole 95 % interval of the mean improvement is below
the limit, which is zero or, for `publish.metric`, −`publish.max_regression`; an interval that contains the limit does
not prevent publishing. `publish.max_regression` is in the unit of `publish.metric`, so the limit of default metrics is
zero. The comparison with the published version (`raise_if_regression`) is another one: of two numbers, without an
interval, and with the same limit.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptf import storage
from ptf.artifact import START
from ptf.config import Job
from ptf.config.recipes import algo_config
from ptf.errors import UserError
from ptf.storage import file_verification

LOSSES = "held_out"  # directory in the run's: loss and denominator of each held-out sequence
RESPONSES = "responses"  # directory in the run's: the greedy responses of the evaluate stage, one line per prompt
RANKED = "ranked"  # directory in the run's: the ranking metrics of each user, written by ptf.evaluate.measurement
AGAIN = "run the evaluate stage again"
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

    def is_worse(self, allowed: float = 0.0) -> bool:
        """Return whether the upper end of the interval of the improvement is below `-allowed`."""
        return self.high < -allowed

    def describe(self, allowed: float = 0.0) -> str:
        """Return both values, the interval and the verdict, where a regression of `allowed` does not prevent
        publishing."""
        change = f"{self.metric} {self.start:.4g} of the starting model, {self.now:.4g} of the trained one"
        if not self.rows:
            return f"{change}; not a mean over rows, so it has no interval"
        if math.isinf(self.low):
            return f"{change}; {self.rows} held-out items are too few for an interval"
        if self.is_worse(allowed):
            verdict = "worse"
        elif self.is_worse():
            verdict = "worse, within publish.max_regression"
        else:
            verdict = "better" if self.low > 0 else "no significant difference"
        interval = f"{self.low:+.3g} to {self.high:+.3g}"
        return f"{change}; improvement {interval} (95 % interval over {self.rows} held-out items): {verdict}"


def comparisons(job: Job, run: Path, metrics: Mapping[str, float]) -> list[Comparison]:
    """Compare the trained model with the model that training started from.

    `publish.metric` is compared if it is set and was measured on both models. Otherwise it is the first of these that
    was measured on both: mean reward and pass rate of greedy responses, NDCG of the ranking, the held-out loss. The
    list is empty if nothing is held out or `publish.gate` is `unmeasured`. Raises UserError if the stored
    rows of the two models are not the same rows.
    """
    named = job.publish.metric
    if f"{START}{named}" in metrics:
        more = not job.publish.less_is_better
        return [_compared(str(named), more, _paired_values(job, run, str(named)), metrics)]
    measured = ([name for name in names if START + name in metrics] for names in defaults(job))
    names = next(filter(None, measured), [])
    return [_compared(name, not _is_loss(name), _paired_values(job, run, name), metrics) for name in names]


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
    return [name for name in wanted if name not in metrics]


def _is_scored(job: Job) -> bool:
    """Return whether responses to held-out prompts get rewards."""
    rollout = job.rollout
    return bool(job.evaluate.reward or (rollout and (rollout.reward or rollout.is_multi_turn)))


def needs_losses(job: Job) -> bool:
    """Return whether, by the config, the gate will compare the held-out loss of each row."""
    if job.publish.gate != "starting_model":
        return False
    metric = job.publish.metric
    if metric is not None and not metric.startswith("train/"):
        return _is_loss(metric)
    ranked = job.evaluate.ranking and job.model.init == "pretrained"
    return not ((job.evaluate.sources and _is_scored(job)) or ranked)


def _is_loss(metric: str | None) -> bool:
    return metric is not None and metric.startswith(("loss/", "kl/"))


PairedValues = tuple[np.ndarray, np.ndarray, np.ndarray]  # [rows] each: value at the start, value now, denominator


def _paired_values(job: Job, run: Path, metric: str) -> PairedValues | None:
    """Return the values of a metric by row, at the start and now; None if the metric is not a mean over rows."""
    if _is_loss(metric):
        name = metric.partition("/")[2]
        then, now = _read(run / LOSSES, name)
        return (
            None if not now else _paired([(a["value"], b["value"], b["denominator"]) for a, b in _both(then, now, run)])
        )
    measure, _, source = metric.rpartition("/")
    if source in job.evaluate.sources and measure in ("greedy_reward", "greedy_pass_rate"):
        then, now = _read(run / RESPONSES, source)
        value = float if measure == "greedy_reward" else lambda reward: float(reward >= 1)
        pairs = [(a["reward"], b["reward"]) for a, b in _both(then, now, run, "row")]
        return _paired([(value(a), value(b), 1.0) for a, b in pairs if a is not None and b is not None])
    if job.evaluate.ranking and source in job.evaluate.ranking.sources:
        then, now = _read(run / RANKED, source)
        return _paired(
            [(a[measure], b[measure], 1.0) for a, b in _both(then, now, run, "user") if measure in a and measure in b]
        )
    return None


def _read(place: Path, source: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows at the start and now; both lists are empty if the evaluation wrote none."""
    if place.is_dir():
        file_verification.raise_if_different(str(place), file_verification.of_run(place), float("inf"), AGAIN)
    files = [place / prefix / f"{source}.jsonl" for prefix in ("start", "")]
    then, now = (
        [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else [] for file in files
    )
    return then, now


def _both(then: Sequence[dict], now: Sequence[dict], run: Path, key: str = "") -> Iterator[tuple[dict, dict]]:
    """Yield each row's record at the start together with its record now. Raises UserError if the rows differ."""
    if len(then) != len(now) or any(key and a[key] != b[key] for a, b in zip(then, now, strict=True)):
        raise UserError(f"{run}: the two models were not measured on the same held-out rows; {AGAIN}")
    yield from zip(then, now, strict=True)


def _paired(rows: Sequence[tuple[float, float, float]]) -> PairedValues:
    table = np.array(rows, np.float64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _compared(metric: str, more: bool, values: PairedValues | None, metrics: Mapping[str, float]) -> Comparison:
    start, now, sign = metrics[START + metric], metrics[metric], 1.0 if more else -1.0
    if values is None:  # the metric is one number of all rows together
        return Comparison(metric, 0, start, now, sign * (now - start), sign * (now - start))
    then, after, denominators = values
    low, high = interval(sign * (after - then), denominators)
    return Comparison(metric, len(then), start, now, low, high)


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
    why = ""
    if job.publish.gate != "starting_model":
        why = f"publish.gate is {job.publish.gate}"
    elif not compared:
        why = "nothing held out was measured on both models (evaluate.sources, evaluate.ranking, data.validation)"
    if why:
        return f"not compared with what training started from: {why}"
    return "; ".join(one.describe(_allowed(job, one)) for one in compared)


def _allowed(job: Job, one: Comparison) -> float:
    """Return the regression of a metric that does not prevent publishing: `publish.max_regression` is in the unit of
    `publish.metric`, and does not apply to the metrics that are compared in its place."""
    return job.publish.max_regression if one.metric == job.publish.metric else 0.0


def raise_if_worse(job: Job, compared: Sequence[Comparison]) -> None:
    """Raise Worse, which names the metrics that became worse, if the gate is on and any did."""
    worse = [one for one in compared if one.is_worse(_allowed(job, one))]
    if worse and job.publish.gate == "starting_model":
        allowed = max(_allowed(job, one) for one in worse)
        limit = f"; allowed regression: {allowed:g} (publish.max_regression)" if allowed else ""
        said = "; ".join(one.describe(_allowed(job, one)) for one in worse)
        raise Worse(
            f"not published: worse than what training started from: {said}{limit}. "
            "publish.gate: off skips this comparison (a flow: run --continue RUN_NAME --set publish.gate=off); the "
            "checks of the exported files and against the published version remain"
        )


def raise_if_regression(
    metrics: Mapping[str, float],
    published: Mapping[str, float],
    metric: str,
    max_regression: float,
    less_is_better: bool = False,
) -> None:
    """Raise UserError if `metric` is missing, and Worse if it is worse than the published version's by more than
    `max_regression`."""
    if metric not in metrics:
        raise UserError(
            f"publish.metric: the evaluation has no {metric!r}; it has {', '.join(sorted(metrics)) or 'nothing'}"
        )
    before = published.get(metric)
    if before is not None and not (metrics[metric] - before) * (-1 if less_is_better else 1) >= -max_regression:
        raise Worse(
            f"not published: {metric} is {metrics[metric]:.4g}, the published version has {before:.4g}; allowed "
            f"regression: {max_regression:g} (publish.max_regression)"
        )
