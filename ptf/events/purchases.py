"""The purchases of users as flat arrays, which methods that count read; with the time of each request, where known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from ptf.events.histories import History
from ptf.events.serialize import DAY

Sparse = Any  # a csr_matrix, whose type stubs lack products and signs


@dataclass(frozen=True)
class Purchases:
    """An entry for each item of each basket, ordered by user and basket."""

    users: tuple[str, ...]
    items: int  # of the catalogue
    user: np.ndarray  # [purchases]: place in `users`
    item: np.ndarray  # [purchases]: place in the catalogue
    basket: np.ndarray  # [purchases]: number of the user's basket, 0 for the oldest
    time: np.ndarray  # [purchases]: seconds
    now: np.ndarray  # [users]: time of the request in seconds, NaN where it is not known

    @staticmethod
    def of(
        histories: Sequence[tuple[str, History]], items: Sequence[str], now: Sequence[float | None] | None = None
    ) -> "Purchases":
        """Return the purchases of users' histories. `items`: the catalogue's names; `now`: the time of each request."""
        place = {name: index for index, name in enumerate(items)}
        rows = [
            (user, place[item], number, basket.time)
            for user, (_, history) in enumerate(histories)
            for number, basket in enumerate(history)
            for item in basket.items
        ]
        user, item, basket, time = np.array(rows, float).reshape(-1, 4).T
        user, item, basket = (x.astype(int) for x in (user, item, basket))
        times = np.array([None] * len(histories) if now is None else now, float)  # None becomes NaN
        return Purchases(tuple(name for name, _ in histories), len(items), user, item, basket, time, times)

    @cached_property
    def baskets(self) -> np.ndarray:
        """The number of baskets of each user, [users]."""
        return self._latest(self.basket + 1).astype(int)

    @cached_property
    def at(self) -> np.ndarray:
        """The time of each request; where it is not known, that of the user's newest basket, [users]."""
        return np.where(np.isnan(self.now), self._latest(self.time), self.now)

    @property
    def age(self) -> np.ndarray:
        """How many baskets the user has had since each purchase, [purchases]."""
        return self.baskets[self.user] - 1 - self.basket

    @property
    def days(self) -> np.ndarray:
        """Days from each purchase to the request, [purchases]."""
        return np.maximum(self.at[self.user] - self.time, 0) / DAY

    @cached_property
    def had(self) -> Sparse:
        """1 for each item that a user had, [users, items]."""
        return self.matrix(np.ones(len(self.user))).sign()

    def matrix(self, weights: np.ndarray) -> Sparse:
        """Return the sums of the weights of purchases, [users, items]."""
        return sparse.csr_matrix((weights, (self.user, self.item)), (len(self.users), self.items))

    def before(self, time: float) -> "Purchases":
        """Return what was bought before a time, for requests at that time; every user remains."""
        kept = {name: getattr(self, name)[self.time < time] for name in ("user", "item", "basket", "time")}
        return replace(self, **kept, now=np.full(len(self.users), time))

    def _latest(self, values: np.ndarray) -> np.ndarray:
        latest = np.zeros(len(self.users))
        latest[self.user] = values  # the last entry of a user counts, and it is the newest
        return latest
