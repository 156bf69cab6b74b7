"""Rivals of a trained model: methods that count, and a linear one, each fitted on the training histories alone.

A baseline is a function of the training purchases, whose other arguments are its settings. It returns a function from
the purchases of users, who need not be known from training, to a score of every item, [users, items]. Where a request
has a time, the methods that know days use it. Otherwise they use the time of the user's newest basket.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import sparse

from ptf.config import ConfigError
from ptf.events.neighbours import Scores, taiw, tifu_knn, tifu_knn_time, up_cf
from ptf.events.purchases import Purchases, Sparse
from ptf.events.serialize import DAY

KEY = "evaluate.ranking.baselines"
LARGEST = 20_000  # items: EASE inverts a matrix of all pairs, then of 3.2 GB
POSITIVE = ("group_days", "l2")  # settings that 0 would break
SIGNED = ("ease", "mix")  # have scores below 0, which have no logarithm
MIXED = MappingProxyType({"tifu_knn": {"weight": 1.0}, "up_cf": {"weight": 0.3}, "ease": {"weight": 0.3}})


def popularity(train: Purchases, *, days: float = 0.0) -> Scores:
    """Score by the users who had an item; with `days`, by its purchases in so many days before the request."""
    order = np.argsort(train.time, kind="stable")
    times, items, users = train.time[order], train.item[order], _users(train)

    def scores(asked: Purchases) -> np.ndarray:
        if not days:
            return np.tile(users, (len(asked.users), 1))
        windows = np.searchsorted(times, [asked.at - days * DAY, asked.at]).T
        return np.array([np.bincount(items[a:b], minlength=train.items) for a, b in windows], float)

    return scores


def frequency(train: Purchases, *, decay: float = 0.85, half_life: float = 0.0, popularity: float = 0.1) -> Scores:
    """Score by how often the user had it, plus `popularity` · log(1 + users who had it) / log(1 + all users).

    A purchase loses the factor `decay` with each later basket; with `half_life`, it loses half in so many days up to
    the request instead.
    """
    prior = popularity * np.log1p(_users(train)) / np.log1p(len(train.users))

    def scores(asked: Purchases) -> np.ndarray:
        return asked.matrix(0.5 ** (asked.days / half_life) if half_life else decay**asked.age).toarray() + prior

    return scores


def item_knn(train: Purchases) -> Scores:
    """Score by the sum of cosines with the user's items; an item's vector says which users had it."""
    both, size = (train.had.T @ train.had).tocoo(), np.sqrt(_users(train))
    cosines = np.where(both.row == both.col, 0, both.data / (size[both.row] * size[both.col]))
    near: Sparse = sparse.csr_matrix((cosines, (both.row, both.col)), both.shape)
    return lambda asked: (asked.had @ near).toarray()


def ease(train: Purchases, *, l2: float = 150.0, decay: float = 0.7) -> Scores:
    """Score by the linear item-item model EASE, in closed form (Steck 2019, eq. 8).

    Its weights have a zero diagonal, and predict each user's items from the others, with the penalty `l2`. A basket of
    the history that is scored loses the factor `decay` with each later one.
    """
    if train.items > LARGEST:
        raise ConfigError(f"{KEY}.ease is for at most {LARGEST} items, the catalogue has {train.items}: remove it")
    weights = np.linalg.inv((train.had.T @ train.had).toarray() + l2 * np.eye(train.items))
    weights /= -np.diag(weights)
    np.fill_diagonal(weights, 0)
    return lambda asked: asked.matrix(decay**asked.age) @ weights


def mix(train: Purchases, *, of: Mapping[str, Mapping[str, Any]] = MIXED) -> Scores:
    """Mix other baselines: sum their scores, each standardised per user, times their `weight`.

    `of` has the settings of each by its name, and its weight.
    """
    parts = [(one["weight"], fit(name, _settings(one), train)) for name, one in of.items()]
    return lambda asked: np.sum([weight * standardised(scores(asked)) for weight, scores in parts], axis=0)


BASELINES: Mapping[str, Callable[..., Scores]] = {
    "popularity": popularity,
    "personal_frequency": partial(frequency, decay=1.0, popularity=1e-3),
    "recency": partial(frequency, decay=0.5, popularity=1e-9),
    "decayed_frequency": frequency,
    "item_knn": item_knn,
    "up_cf": up_cf,
    "tifu_knn": tifu_knn,
    "tifu_knn_time": tifu_knn_time,
    "taiw": taiw,
    "ease": ease,
    "mix": mix,
}


def fit(name: str, settings: Mapping[str, Any], train: Purchases) -> Scores:
    """Return what scores items by the baseline of a name. Raises ConfigError as `check` does."""
    check(name, settings)
    return BASELINES[name](train, **settings)


def check(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if there is no baseline of this name with these settings."""
    if name not in BASELINES:
        raise ConfigError(f"{KEY}: {name} is not a baseline; there are {', '.join(BASELINES)}")
    _, *parameters = inspect.signature(BASELINES[name]).parameters.values()  # without the purchases
    defaults = {parameter.name: parameter.default for parameter in parameters}
    for key, value in settings.items():
        if key not in defaults:
            raise ConfigError(f"{KEY}.{name} has no setting {key!r}; it has {', '.join(defaults) or 'none'}")
        kind, where = type(defaults[key]), f"{KEY}.{name}.{key}"
        if kind in (int, float) and not (type(value) in (int, kind) and int(kind is int) <= value < math.inf):
            what = "a whole number of at least 1" if kind is int else "a number of at least 0"
            raise ConfigError(f"{where} must be {what}, not {value!r}")
        if (key in POSITIVE and value == 0) or (key == "own_weight" and value > 1):
            raise ConfigError(f"{where} must be {'above 0' if key in POSITIVE else 'at most 1'}, not {value!r}")
        if key == "of" and not (value and isinstance(value, Mapping)):
            raise ConfigError(f"{where} must give other baselines by name, each with a `weight`, not {value!r}")
        for other, one in value.items() if key == "of" else ():
            if other == "mix" or not isinstance(one, Mapping) or type(one.get("weight")) not in (int, float):
                raise ConfigError(f"{where} must give each of the other baselines a `weight`, not {other}: {one}")
            check(other, _settings(one))


def standardised(scores: np.ndarray) -> np.ndarray:
    """Return scores with mean 0 and standard deviation 1 over the items of each user; 0 where all are equal."""
    centred = scores - scores.mean(1, keepdims=True)
    return centred / np.maximum(centred.std(1, keepdims=True), 1e-300)


def _settings(mixed: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mixed.items() if key != "weight"}


def _users(train: Purchases) -> np.ndarray:
    """Return how many users had each item, [items]."""
    return np.asarray(train.had.sum(0), float).ravel()
