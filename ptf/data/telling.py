"""A user's history as rows of data.

The one idea: it is told in the order of time, `<start> basket <gap> basket <gap> …`, where a gap's token stands behind the basket whose distance from the
one before it says. So what follows the last gap is the next basket, and nothing in the text knows when that will be.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptf.data.catalogue import Item
from ptf.data.histories import History, Split
from ptf.data.tokenizer import START

DAY = 86400.0
GAPS = 10  # tokens: less than a day, then twice as long each


@dataclass(frozen=True)
class Told:
    """A basket."""

    items: list[str]  # in tokens
    gap: str  # the token that follows
    days: float | None  # since the one before it
    spend: float  # what its items are worth


class Telling:
    """Histories as rows of data."""

    def __init__(self, items: Mapping[str, Item], window: int, gaps: bool, opening: float) -> None:
        self.items, self.window, self.gaps, self.opening = items, window, gaps, opening
        self.left_out = 0  # baskets of one item that nothing comes before
        self.size = max(item.text.count("<") for item in items.values())

    def told(self, history: History) -> list[Told]:
        found, before = list[Told](), None
        for basket in history:
            days = None if before is None else (basket.time - before) / DAY
            gap = min(GAPS - 1, int((days or 0) >= 1) + int(math.log2(max(days or 0, 1.0)))) if self.gaps else 0
            spend = sum(self.items[item].value for item in basket.items)
            found.append(Told([self.items[item].text for item in basket.items], f"<gap_{gap}>", days, spend))
            before = basket.time
        return found

    def windows(self, history: History) -> Iterator[dict[str, Any]]:
        """Baskets, each trained in one row, after as many of those before it as half a window holds; one item after nothing is left out."""
        told = list(self._pieces(self.told(history)))
        at = 0
        while at < len(told):
            first, size = at, 1
            while first > 0 and size + self._tokens(told[first - 1]) <= self.window // 2:
                first -= 1
                size += self._tokens(told[first])
            end = at
            while end < len(told) and (size + self._tokens(told[end]) <= self.window or end == at):
                size += self._tokens(told[end])
                end += 1
            if end - first > 1 or len(told[at].items) > 1 or self.size > 1:
                yield self._row(told[first:end], 1 + 2 * (at - first))
            else:
                self.left_out += 1
            at = end

    def _row(self, told: Sequence[Told], context: int) -> dict[str, Any]:
        entries, days, spend = [START], [None], [None]
        for basket in told:
            entries += [basket.items, basket.gap]
            days += [basket.days, None]
            spend += [basket.spend, None]
        return {"events": entries, "context": context, "opening": self.opening, "values": {"days": days, "spend": spend}}

    def prompt(self, user: str, s: Split) -> dict[str, Any]:
        """A history to continue, what did (`future`), and that in tokens (`told`)."""
        told = lambda baskets: "".join("".join(basket.items) + basket.gap for basket in baskets)  # noqa: E731
        later = self.told((*s.before, *s.future))[len(s.before) :]
        return {
            "messages": [{"role": "user", "content": START + told(self._newest(s.before))}], "user": user,
            "history": sorted({item for basket in s.before for item in basket.items}), "future": [list(basket.items) for basket in s.future],
            "told": [told([basket]) for basket in later],
        }  # fmt: skip

    def chat(self, s: Split, rng: np.random.Generator) -> dict[str, Any]:
        """A history, answered with the next basket, in some order."""
        (basket,) = self.told(s.future[:1])
        said = "".join(basket.items[i] for i in rng.permutation(len(basket.items)))
        history = START + "".join("".join(b.items) + b.gap for b in self._newest(s.before))
        return {"messages": [{"role": "user", "content": history}, {"role": "assistant", "content": said}]}

    def continued(self, s: Split) -> dict[str, Any]:
        """The held-out basket after its history, which is context."""
        told = self._newest((*s.before, s.future[0]), least=2)
        row = self._row(told, 2 * len(told) - 1)
        values = {name: numbers[:-1] for name, numbers in row["values"].items()}
        return row | {"events": row["events"][:-1], "values": values}

    def _newest(self, history: History, least: int = 1) -> list[Told]:
        """The newest baskets that fit the window, of the oldest of them what fits."""
        kept: list[Told] = []
        room = self.window - 1
        for basket in reversed(self.told(history)):
            share = max(1, (room - 1) // self.size if len(kept) + 1 >= least else (self.window // 2) // self.size)
            if room < 1 + self.size and len(kept) >= least:
                break
            kept.insert(0, replace(basket, items=basket.items[:share]))
            room -= self._tokens(kept[0])
        return kept

    def _pieces(self, told: Iterable[Told]) -> Iterator[Told]:
        """Baskets of more than half a window, in parts."""
        most = max(1, (self.window // 2 - 1) // self.size)
        for basket in told:
            for at in range(0, len(basket.items), most):
                yield replace(basket, items=basket.items[at : at + most])

    def _tokens(self, told: Told) -> int:
        return len(told.items) * self.size + 1
