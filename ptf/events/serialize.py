"""A user's history as rows of data.

A history is written in the order of time, `<start> basket <gap> basket <gap> …`. The gap token after a basket encodes
the time since the previous basket. So no token before a basket reveals its time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptf.data.event_tokens import START
from ptf.events.catalogue import Item
from ptf.events.histories import History, Split

DAY = 86400.0
GAPS = 10  # number of gap tokens: less than a day, then intervals that double in length


def days_of(gap: int) -> float:
    """Return the days that a gap token stands for: the middle of 0 to 1, 1 to 2, 2 to 4, 4 to 8 days, ..."""
    return 0.5 if gap == 0 else 1.5 * 2 ** (gap - 1)


@dataclass(frozen=True)
class SerializedBasket:
    """A basket as tokens."""

    items: list[str]  # the token texts of its items
    gap: str  # the gap token that follows it
    days: float | None  # days since the basket before it
    spend: float  # total value of its items


class HistorySerializer:
    """Converts histories to rows of data."""

    def __init__(self, items: Mapping[str, Item], window: int, gaps: bool, opening: float) -> None:
        """Create a serializer.

        `items` are the catalogue's items by name; `window` is the largest number of tokens of a history; without
        `gaps`, all gap tokens are the same; `opening` is the loss weight of a basket's first item.
        """
        self.items, self.window, self.gaps, self.opening = items, window, gaps, opening
        self.left_out = 0  # number of baskets of one item that have no basket before them
        self.size = max(item.text.count("<") for item in items.values())

    def serialize(self, history: History) -> list[SerializedBasket]:
        """Return the baskets of a history as tokens."""
        result, before = list[SerializedBasket](), None
        for basket in history:
            days = None if before is None else (basket.time - before) / DAY
            gap = min(GAPS - 1, int((days or 0) >= 1) + int(math.log2(max(days or 0, 1.0)))) if self.gaps else 0
            items, before = [self.items[item] for item in basket.items], basket.time
            spend = sum(item.value for item in items)
            result.append(SerializedBasket([item.text for item in items], f"<gap_{gap}>", days, spend))
        return result

    def windows(self, history: History) -> Iterator[dict[str, Any]]:
        """Yield rows in which each basket is trained once, after the earlier baskets that fit half a window as context.

        A basket of one item that has no basket before it is left out.
        """
        most = max(1, (self.window // 2 - 1) // self.size)  # a basket larger than half a window is split into parts
        baskets = [
            replace(basket, items=basket.items[start : start + most])
            for basket in self.serialize(history)
            for start in range(0, len(basket.items), most)
        ]
        next_trained = 0
        while next_trained < len(baskets):
            first, size = next_trained, 1
            while first > 0 and size + self._tokens(baskets[first - 1]) <= self.window // 2:
                first -= 1
                size += self._tokens(baskets[first])
            end = next_trained
            while end < len(baskets) and (size + self._tokens(baskets[end]) <= self.window or end == next_trained):
                size += self._tokens(baskets[end])
                end += 1
            if end - first > 1 or len(baskets[next_trained].items) > 1 or self.size > 1:
                yield self._row(baskets[first:end], 1 + 2 * (next_trained - first))
            else:
                self.left_out += 1
            next_trained = end

    def _row(self, baskets: Sequence[SerializedBasket], context: int) -> dict[str, Any]:
        """Return a row with these baskets; its first `context` entries are context."""
        entries, days, spend = [START], [None], [None]
        for basket in baskets:
            entries += [basket.items, basket.gap]
            days += [basket.days, None]
            spend += [basket.spend, None]
        return {
            "events": entries,
            "context": context,
            "opening": self.opening,
            "values": {"days": days, "spend": spend},
        }

    def prompt(self, user: str, s: Split) -> dict[str, Any]:
        """Return a prompt row: the history, the baskets that followed (`future`), and their tokens (`told`)."""
        later = self.serialize((*s.before, *s.future))[len(s.before) :]
        return {
            "messages": [{"role": "user", "content": START + _text(self._newest(s.before))}],
            "user": user,
            "history": sorted({item for basket in s.before for item in basket.items}),
            "future": [list(basket.items) for basket in s.future],
            "told": [_text([basket]) for basket in later],
        }

    def chat(self, s: Split, rng: np.random.Generator) -> dict[str, Any]:
        """Return a chat: the history as the user's message, and the next basket's items, in random order, as the
        response."""
        (basket,) = self.serialize(s.future[:1])
        answer = "".join(basket.items[i] for i in rng.permutation(len(basket.items)))
        return {
            "messages": [
                {"role": "user", "content": START + _text(self._newest(s.before))},
                {"role": "assistant", "content": answer},
            ]
        }

    def held_out_row(self, s: Split) -> dict[str, Any]:
        """Return a row with the history as context, followed by the held-out basket."""
        baskets = self._newest((*s.before, s.future[0]), least=2)
        row = self._row(baskets, 2 * len(baskets) - 1)
        for numbers in (row["events"], *row["values"].values()):
            del numbers[-1]  # the gap after the basket
        return row

    def _newest(self, history: History, least: int = 1) -> list[SerializedBasket]:
        """Return the newest baskets that fit the window; some items of the oldest may be cut off."""
        newest: list[SerializedBasket] = []
        room = self.window - 1
        for basket in reversed(self.serialize(history)):
            share = max(1, (room - 1) // self.size if len(newest) + 1 >= least else (self.window // 2) // self.size)
            if room < 1 + self.size and len(newest) >= least:
                break
            newest.insert(0, replace(basket, items=basket.items[:share]))
            room -= self._tokens(newest[0])
        return newest

    def _tokens(self, basket: SerializedBasket) -> int:
        """Return the number of tokens of a basket, including its gap token."""
        return len(basket.items) * self.size + 1


def _text(baskets: Sequence[SerializedBasket]) -> str:
    return "".join("".join(basket.items) + basket.gap for basket in baskets)
