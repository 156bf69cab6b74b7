"""Baselines with neighbours: a user's scores are mixed with those of the users who are most like them."""

from collections.abc import Callable

import numpy as np
from scipy import sparse

from ptf.events.purchases import Purchases, Sparse
from ptf.events.serialize import DAY

Scores = Callable[[Purchases], np.ndarray]  # purchases of users → a score of every item, [users, items]
Vectors = Callable[[Purchases], Sparse]  # → a vector of each user, [users, items]
ROUNDS = 30  # of expectation maximisation


def up_cf(train: Purchases, *, recency: int = 10, alpha: float = 0.75, locality: float = 5.0) -> Scores:
    """Score by user-wise popularity with collaborative filtering, UP-CF@r (Faggioli, Polato and Aiolli 2020).

    A profile is the share of the user's newest `recency` baskets that have an item. A score is the sum of the training
    users' profiles, each times the asymmetric cosine of the sets of their items to the power of `locality`. `alpha` is
    the exponent of the size of the scored user's set. The user's own profile counts too, if it is one of them.
    """

    def profiles(purchases: Purchases) -> Sparse:
        share = 1 / np.minimum(recency, purchases.baskets)[purchases.user]
        found = purchases.matrix(np.where(purchases.age < recency, share, 0))
        found.eliminate_zeros()
        return found

    others = profiles(train)

    def scores(asked: Purchases) -> np.ndarray:
        own = profiles(asked)
        both = (own.sign() @ others.sign().T).tocoo()
        sizes = own.getnnz(1)[both.row] ** alpha * others.getnnz(1)[both.col] ** (1 - alpha)
        near: Sparse = sparse.csr_matrix(((both.data / sizes) ** locality, (both.row, both.col)), both.shape)
        return (near @ others).toarray()

    return scores


def tifu_knn(
    train: Purchases,
    *,
    neighbours: int = 100,
    own_weight: float = 0.3,
    groups: int = 7,
    within_decay: float = 0.9,
    group_decay: float = 0.7,
) -> Scores:
    """Score by temporal item frequencies of the user and of neighbours, TIFU-kNN (Hu, He, Gao and Zhang 2020).

    A user's baskets are divided into `groups` of equal size, of which the newest ones take what is over. A basket loses
    the factor `within_decay` with each later basket of its group, a group the factor `group_decay` with each later
    group. The vector is the mean over groups of their means over baskets. A score is `own_weight` times the user's
    vector, and 1 − `own_weight` times the mean of the `neighbours` nearest vectors, by Euclidean distance.
    """

    def vectors(purchases: Purchases) -> Sparse:
        baskets, age = purchases.baskets[purchases.user], purchases.age
        number = np.minimum(baskets, groups)
        size, larger = np.divmod(baskets, number)  # `larger` groups, the newest, have a basket more
        inside = age < larger * (size + 1)
        group, within = np.divmod(np.where(inside, age, age - larger), size + inside)
        weights = group_decay**group * within_decay**within
        return purchases.matrix(weights / ((size + inside) * number))

    return _with_neighbours(train, vectors, neighbours, own_weight, by_time=False)


def tifu_knn_time(
    train: Purchases,
    *,
    neighbours: int = 100,
    own_weight: float = 0.3,
    group_days: float = 60.0,
    within_decay: float = 0.995,
    group_decay: float = 0.7,
) -> Scores:
    """Score by TIFU-kNN with time (Romanov, Lashinin, Ananyeva and Kolesnikov 2023): baskets decay by days.

    A group is all baskets of the same `group_days` days, counted back from the request. A basket loses the factor
    `within_decay` with each day up to the end of its group. The rest is as in `tifu_knn`. Where the time of the
    request is known, neighbours are as they were at the beginning of its day (UTC).
    """

    def vectors(purchases: Purchases) -> Sparse:
        group, within = np.divmod(purchases.days, group_days)
        first = _changes(purchases.user, group)  # purchases are ordered by user and basket
        of = first.cumsum() - 1
        size = np.bincount(of, _changes(purchases.user, purchases.basket))  # baskets of each group
        number = np.bincount(purchases.user, first, len(purchases.users))[purchases.user]
        weights = group_decay**group * within_decay**within
        return purchases.matrix(weights / (size[of] * number))

    return _with_neighbours(train, vectors, neighbours, own_weight, by_time=True)


def _changes(*columns: np.ndarray) -> np.ndarray:
    """Return whether a row of the columns differs from the one before, [rows]; the first does."""
    return np.logical_or.reduce([np.diff(column, prepend=np.nan) != 0 for column in columns])


def taiw(
    train: Purchases, *, neighbours: int = 100, own_weight: float = 0.5, prior: float = 20.0, popularity: float = 0.001
) -> Scores:
    """Score by time-aware item weighting (Romanov, Lashinin, Ananyeva and Kolesnikov 2023), without gradients.

    Kept are the score of own items and the neighbours. A purchase d days before the request adds to its item
    a · ((1 − p) · Exp(d; mean b) + p · Normal(d; m, s)), with the item's own a, b, p, m and s. Scores are mixed with
    the mean of the nearest users' scores, as in `tifu_knn`. Left out are the pairwise loss and the base intensity, a
    matrix factorisation, in whose place stands `popularity` times the share of users. b, p, m and s are fitted to the
    days between a user's purchases of the item, by expectation maximisation, and a is the share of its purchases that
    are followed by another. All are shrunk to the catalogue's, which count as `prior` purchases.
    """
    order = np.lexsort((train.basket, train.item, train.user))
    user, item, time = train.user[order], train.item[order], train.time[order]
    again = (user[1:] == user[:-1]) & (item[1:] == item[:-1])
    gaps, of = np.diff(time)[again] / DAY, item[1:][again]
    pooled = _densities(gaps, np.zeros_like(of), np.array([[0.5], [30.0], [30.0], [30.0]]), 1.0)
    densities = _densities(gaps, of, np.repeat(pooled, train.items, 1), prior)
    bought, repeated = (np.bincount(x, minlength=train.items) for x in (item, of))
    share = (repeated + prior * len(of) / len(item)) / np.maximum(bought + prior, 1)
    base = popularity * np.asarray(train.had.mean(0)).ravel()

    def vectors(purchases: Purchases) -> Sparse:
        density = np.add(*_parts(purchases.days, densities[:, purchases.item]))
        return purchases.matrix(share[purchases.item] * density)

    mixed = _with_neighbours(train, vectors, neighbours, own_weight, by_time=True)
    return lambda asked: mixed(asked) + base


def _parts(days: np.ndarray, settings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (1 − p) · Exp(days; mean b) and p · Normal(days; m, s); `settings` are p, b, m and s, [4, n]."""
    p, b, m, s = settings
    return (1 - p) * np.exp(-days / b) / b, p * np.exp(-(((days - m) / s) ** 2) / 2) / (s * np.sqrt(2 * np.pi))


def _densities(gaps: np.ndarray, of: np.ndarray, found: np.ndarray, prior: float) -> np.ndarray:
    """Return p, b, m and s of each group's mixture, [4, groups], by expectation maximisation from `found`, which counts
    as `prior` gaps. b and s are at least a day."""
    p, b, m, s = found
    known = prior * np.array([p, p * m, p * (s**2 + m**2), 1 - p, (1 - p) * b])
    for _ in range(ROUNDS):
        exponential, normal = _parts(gaps, found[:, of])
        share = normal / np.maximum(exponential + normal, 1e-300)
        sums = [share, share * gaps, share * gaps**2, 1 - share, (1 - share) * gaps]
        n, first, second, rest, days = known + [np.bincount(of, x, found.shape[1]) for x in sums]
        n, rest = np.maximum(n, 1e-9), np.maximum(rest, 1e-9)
        deviation = np.sqrt(np.maximum(second / n - (first / n) ** 2, 1))
        found = np.array([n / (n + rest), np.maximum(days / rest, 1), first / n, deviation])
    return found


def _with_neighbours(
    train: Purchases, vectors: Vectors, neighbours: int, own_weight: float, *, by_time: bool
) -> Scores:
    """Return scores that mix the user's vector with the mean of the nearest other users' vectors.

    With `by_time`, a request of a known time has neighbours as they were at the beginning of its day.
    """
    everything, place = vectors(train), {user: row for row, user in enumerate(train.users)}
    k = min(neighbours, len(train.users))

    def scores(asked: Purchases) -> np.ndarray:
        found = np.zeros((len(asked.users), train.items))
        days = np.floor(asked.now / DAY) if by_time else np.full(len(asked.users), np.nan)
        own_vectors = vectors(asked)
        for day in np.unique(days):
            rows = np.flatnonzero(np.isnan(days) if np.isnan(day) else days == day)
            others = everything if np.isnan(day) else vectors(train.before(day * DAY))
            own, squares = own_vectors[rows], np.asarray(others.multiply(others).sum(1)).ravel()
            distances = np.where(others.getnnz(1) > 0, squares, np.inf) - 2 * (own @ others.T).toarray()
            selves = np.array([place.get(asked.users[row], -1) for row in rows])
            distances[np.flatnonzero(selves >= 0), selves[selves >= 0]] = np.inf  # the user is no neighbour
            nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
            real = np.isfinite(np.take_along_axis(distances, nearest, 1))
            shares = (real / np.maximum(real.sum(1, keepdims=True), 1)).ravel()
            cells = (np.repeat(np.arange(len(rows)), k), nearest.ravel())
            mean: Sparse = sparse.csr_matrix((shares, cells), (len(rows), len(train.users))) @ others
            found[rows] = (own_weight * own + (1 - own_weight) * mean).toarray()
        return found

    return scores
