"""An engine that answers a batch with what is no answer, or not at all; as tests.reliability.fallible."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.reliability.fallible import Counted, befall
from tests.rl.faulty import Plugged


class Engine(Plugged):
    def __init__(self, directory: str, *, place: str, fault: str, at: int, **usual: Any) -> None:
        super().__init__(directory, **usual)
        self.fault, self.counted = fault, Counted(place, at, lasts=False)

    def answer(self, requests):
        generations = super().answer(requests)
        if not self.counted.due(len(requests)):
            return generations
        befall(self.fault)
        first, n = generations[0], len(generations[0].sampled_ids)
        changes = {
            "NaN": {"logprobs": np.full(n, np.nan, np.float32)},
            "huge": {"logprobs": np.full(n, -1e308)},
            "texts": {"sampled_ids": np.array(["a"] * n)},
            "empty": {"sampled_ids": first.sampled_ids[:0]},
            "longer": {"sampled_ids": np.tile(first.sampled_ids, 20)},
            "other weights": {"versions": first.versions - 1},
            "other context": {"context": first.context[1:]},
            "beyond the vocabulary": {"sampled_ids": first.sampled_ids + 10**6},
            "fractions": {"sampled_ids": first.sampled_ids + 0.5},
        }
        if self.fault == "out of memory":
            raise MemoryError("no room")
        if self.fault in changes:
            return [replace(first, **changes[self.fault]), *generations[1:]]
        return {"too few": generations[:-1], "too many": [*generations, first], "None": None}[self.fault]
