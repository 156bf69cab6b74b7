"""Streams: endless iterators whose state can be saved between any two items; and random numbers by key.

A state is of plain values, and taking one at every training step costs microseconds.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """A resumable iterator, endless unless its data are read a limited number of times; one that has ended stays so.

    After `b.load_state_dict(a.state_dict())`, a and b yield the same items.
    """

    def __next__(self) -> T_co:
        """Return the next item."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class Passes(Stream[T_co], Protocol[T_co]):
    """A stream over the rows of a source, epoch after epoch."""

    def passes(self) -> int | None:
        """Return the number of epochs of which every item has been yielded; None if there is no further item.

        This may read the next item.
        """
        ...


def randint(key: str, counter: int, n: int) -> int:
    """Return a random number below n that depends only on the arguments."""
    digest = hashlib.blake2b(
        counter.to_bytes(8, "little"), key=hashlib.sha256(key.encode()).digest(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") % n


def permutation(key: str, n: int) -> np.ndarray:
    """Return 0 … n - 1 in a random order that depends only on `key` and n, [n] int64.

    Philox's raw output is the same in every version of numpy; the output of Generator's methods may change.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    return np.argsort(np.random.Philox(key=seed).random_raw(n), kind="stable")
