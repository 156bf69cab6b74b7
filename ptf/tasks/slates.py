"""Slates: items that are recommended together, with a reward made of revenue, diversity and novelty.

    reward = revenue of the slate's items that were bought / revenue of all items that were bought
             + diversity · (mean of 1 − cosine over the slate's pairs)
             + novelty · (mean of −log₂ popularity, divided by its largest value in the catalogue)

The slate has `size` slots. Repetitions of an item do not count, and a token sequence that is not an item counts as an
empty slot. Empty slots contribute 0 to diversity and novelty.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ptf.errors import UserError
from ptf.events.catalogue import Catalogue, load_item_vectors
from ptf.events.ranking_metrics import diversity as apart
from ptf.rl.environments.protocol import StepResult


@functools.cache
def known(catalogue: str) -> tuple[Catalogue, np.ndarray, dict[str, int], float]:
    """Return the catalogue, its vectors [items, d], each item's row in them by name, and the smallest popularity above
    0."""
    found = Catalogue.load(catalogue)
    least = min((item.popularity for item in found.items if item.popularity > 0), default=1.0)
    return found, load_item_vectors(catalogue), {item.name: i for i, item in enumerate(found.items)}, least


def worth(
    text: str, bought: Sequence[str], *, catalogue: str, size: int = 10, diversity: float = 0.1, novelty: float = 0.1
) -> dict[str, float]:
    """Score a slate (item tokens) against the items that were bought. Return the reward and its components."""
    items, vectors, place, least = known(catalogue)
    slate = list(dict.fromkeys(item.name for item in items.read(text)[:size] if item is not None))
    if strange := [name for name in bought if name not in place]:
        raise UserError(
            f"{strange[0]!r} was bought, but is not in {catalogue}: the prompts were made with a different catalogue"
        )
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


def revenue(row: Mapping[str, Any], text: str, **settings: Any) -> float:
    """Return the reward (for `rollout.reward`) of the response, scored against the first basket of the row's `future`.

    `settings` are `catalogue` and the other keyword arguments of `worth`.
    """
    return worth(text, row["future"][0], **settings)["reward"]


class Future:
    """An environment (`rollout.environment`) that replays a user's baskets.

    In each turn the policy answers with a slate. Its reward is that of `worth` against the next basket of the row's
    `future`, and the environment's message then shows that basket; there are at most `turns` turns. The history has the
    baskets, not the recommended slates.
    """

    def __init__(self, row: Mapping[str, Any], seed: int, *, catalogue: str, turns: int = 3, **settings: Any) -> None:
        self.row, self.left, self.catalogue, self.settings = (
            row,
            list(zip(row["future"], row["told"], strict=True))[:turns],
            catalogue,
            settings,
        )

    def reset(self) -> Sequence[Mapping[str, Any]]:
        """Return the messages that the episode begins with."""
        return self.row["messages"]

    def step(self, text: str) -> StepResult:
        """Return the slate's reward and a message with the next basket; the last basket ends the episode."""
        basket, told = self.left.pop(0)
        reward = worth(text, basket, catalogue=self.catalogue, **self.settings)["reward"]
        return StepResult([{"role": "user", "content": told}] if self.left else [], reward, done=not self.left)


def part(answers: Sequence[Mapping[str, Any]], *, of: str, catalogue: str, **settings: Any) -> float:
    """Return the mean of one component of `worth` over greedy responses, for `evaluate.metrics`.

    `of` is `revenue`, `diversity`, `novelty`, `distinct` or `reward`.
    """
    return float(
        np.mean([worth(a["response"], a["row"]["future"][0], catalogue=catalogue, **settings)[of] for a in answers])
    )


def invalid(answers: Sequence[Mapping[str, Any]], *, catalogue: str) -> float:
    """Return the share of the items in greedy responses that are not in the catalogue, for `evaluate.metrics`."""
    named = [item for a in answers for item in known(catalogue)[0].read(a["response"])]
    return sum(item is None for item in named) / max(1, len(named))
