"""Ranks of one process that exchange rows: each is served by the thread of its loader."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ptf.data.loader import Loader


class Threads:
    """ptf.data.rank_balancing.Peers"""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, boxes: list[list[bytes]]) -> None:
        self.rank, self.size, self._barrier, self._boxes = rank, size, barrier, boxes
        self.sent = 0  # bytes, of rows

    @staticmethod
    def group(size: int) -> "list[Threads]":
        barrier, boxes = threading.Barrier(size, timeout=60), [[b""] * size for _ in range(size)]
        return [Threads(rank, size, barrier, boxes) for rank in range(size)]

    def all_gather(self, value: bytes) -> list[bytes]:
        return self.all_to_all([value] * self.size)

    def all_to_all(self, values: Sequence[bytes]) -> list[bytes]:
        self._boxes[self.rank] = list(values)
        self.sent += sum(map(len, values))
        self._barrier.wait()
        heard = [box[self.rank] for box in self._boxes]
        self._barrier.wait()
        return heard


def close(loaders: Sequence[Loader]) -> None:
    """At the same time, as ranks do."""
    with ThreadPoolExecutor(len(loaders)) as pool:
        list(pool.map(Loader.close, loaders))
