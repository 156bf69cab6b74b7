"""Slates: items that are recommended together, and what a business makes of them.

    reward = revenue of the slate's items that were bought / revenue of all that was bought
             + diversity · (mean of 1 − cosine over the slate's pairs)
             + novelty · (mean of −log₂ popularity, as a share of the largest there is)

An item counts once, however often the slate has it, and a token sequence that names no item counts as an empty place.
The slate has `size` places, and what is not filled brings nothing.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ptf.errors import UserError
from ptf.events.catalogue import Catalogue, load_item_vectors
from ptf.events.ranking_metrics import diversity as apart
from ptf.rl.environments.protocol import Turn


@functools.cache
def known(catalogue: str) -> tuple[Catalogue, np.ndarray, dict[str, int], float]:
    """Return the catalogue, its vectors [items, d], each item's place, and the least popularity that there is."""
    found = Catalogue.load(catalogue)
    least = min((item.popularity for item in found.items if item.popularity > 0), default=1.0)
    return found, load_item_vectors(catalogue), {item.name: i for i, item in enumerate(found.items)}, least


def worth(
    text: str, bought: Sequence[str], *, catalogue: str, size: int = 10, diversity: float = 0.1, novelty: float = 0.1
) -> dict[str, float]:
    """Of a slate, told in tokens, beside what was bought: `reward` and the parts that it is made of."""
    items, vectors, place, least = known(catalogue)
    slate = list(dict.fromkeys(item.name for item in items.read(text)[:size] if item is not None))
    if strange := [name for name in bought if name not in place]:
        raise UserError(f"{strange[0]!r} was bought, and is not in {catalogue}: the prompts are of another catalogue")
    value = {name: items.by_name[name].value for name in bought}
    total = sum(value.values())
    share = sum(value.get(name, 0.0) for name in slate) / total if total else 0.0
    rare = [-math.log2(max(items.by_name[name].popularity, least)) / max(-math.log2(least), 1e-9) for name in slate]
    spread = apart(vectors[[place[name] for name in slate]]) * len(slate) / size
    fresh = sum(rare) / size
    return {
        "reward": share + diversity * spread + novelty * fresh,
        "revenue": share,
        "diversity": spread,
        "novelty": fresh,
        "distinct": len(slate) / size,
    }


def revenue(row: Mapping[str, Any], text: str, **knobs: Any) -> float:
    """Return a reward for `rollout.reward`: `worth` of the answer beside the first basket of the row's `future`.

    `catalogue` and the other knobs are those of `worth`.
    """
    return worth(text, row["future"][0], **knobs)["reward"]


class Future:
    """An environment (`rollout.environment`) that plays what a user did: each turn asks for a slate, is worth what
    `worth` says beside the next basket of the row's `future`, and then shows that basket; at most `turns` of them. What
    was recommended is not part of the history."""

    def __init__(self, row: Mapping[str, Any], seed: int, *, catalogue: str, turns: int = 3, **knobs: Any) -> None:
        self.row, self.left, self.catalogue, self.knobs = (
            row,
            list(zip(row["future"], row["told"], strict=True))[:turns],
            catalogue,
            knobs,
        )

    def begin(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages that the episode begins with."""
        return self.row["messages"]

    def act(self, text: str) -> Turn:
        """Return what the shop says of a slate, with its reward; the last basket ends the episode."""
        basket, told = self.left.pop(0)
        reward = worth(text, basket, catalogue=self.catalogue, **self.knobs)["reward"]
        return Turn([{"role": "user", "content": told}], reward) if self.left else Turn(reward=reward, done=True)


def part(answers: Sequence[Mapping[str, Any]], *, of: str, catalogue: str, **knobs: Any) -> float:
    """For `evaluate.metrics`: the mean over greedy answers of one of the parts of `worth` (`revenue`,
    `diversity`, `novelty`, `distinct`)."""
    return float(
        np.mean([worth(a["answer"], a["prompt"]["future"][0], catalogue=catalogue, **knobs)[of] for a in answers])
    )


def invalid(answers: Sequence[Mapping[str, Any]], *, catalogue: str) -> float:
    """For `evaluate.metrics`: share of what greedy answers name that is no item of the catalogue."""
    items = known(catalogue)[0]
    named = [item for a in answers for item in items.read(a["answer"])]
    return sum(item is None for item in named) / max(1, len(named))
