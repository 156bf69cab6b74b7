"""A user's history as rows of data.

A history is written in the order of time, `<start> basket <gap> basket <gap> …`. The gap token after a basket encodes
the time since the previous basket. So no token before a basket reveals its time. With `request_time` it encodes the
time until the next basket, and the last one of a prompt the time until the request.
"""

import itertools
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


def gap_of(days: float) -> int:
    """Return the number of the gap token for a time in days."""
    return min(GAPS - 1, int(days >= 1) + int(math.log2(max(days, 1.0))))


def days_of(gap: int) -> float:
    """Return the days that a gap token stands for: the middle of 0 to 1, 1 to 2, 2 to 4, 4 to 8 days, ..."""
    return 0.5 if gap == 0 else 1.5 * 2 ** (gap - 1)


@dataclass(frozen=True)
class SerializedBasket:
    """A basket as tokens."""

    items: list[str]  # the token texts of its items
    gap: str  # the gap token that follows it
    days: float | None  # days since the basket before it
    spend: float | None  # total value of its items


class HistorySerializer:
    """Converts histories to rows of data."""

    def __init__(
        self, items: Mapping[str, Item], window: int, gaps: bool, inside: float, request_time: bool = False
    ) -> None:
        """Create a serializer.

        `items` are the catalogue's items by name; `window` is the largest number of tokens of a history; without
        `gaps`, all gap tokens are the same; `inside` is the loss weight of every token but the first item of a basket,
        which has weight 1.
        """
        self.items, self.window, self.gaps, self.inside = items, window, gaps, inside
        self.request_time = request_time
        self.left_out = 0  # number of baskets of one item that have no basket before them
        self.size = max(item.text.count("<") for item in items.values())

    def serialize(self, history: History, now: float | None = None) -> list[SerializedBasket]:
        """Return the baskets of a history as tokens; with `request_time`, `now` is the time after the last."""
        result = list[SerializedBasket]()
        days = [None, *((b.time - a.time) / DAY for a, b in itertools.pairwise(history)), None]
        if history and now is not None:
            days[-1] = (now - history[-1].time) / DAY
        for n, basket in enumerate(history):
            gap_days = days[n + self.request_time] or 0.0
            items = [self.items[item] for item in basket.items]
            gap = gap_of(gap_days) if self.gaps else 0
            spend = sum(item.value for item in items)
            result.append(SerializedBasket([item.text for item in items], f"<gap_{gap}>", days[n], spend))
        return result

    def windows(self, history: History) -> Iterator[dict[str, Any]]:
        """Yield rows in which each basket is trained once, after what half a window has of the earlier ones as context.

        A basket of one item that has no basket before it is left out.
        """
        most = max(1, (self.window // 2 - 1) // self.size)  # a basket larger than half a window is split into parts
        baskets = list[SerializedBasket]()
        for basket in self.serialize(history):
            starts = range(0, len(basket.items), most)
            timed = starts[-1] if self.request_time else 0  # the part whose gap is the basket's
            gaps = [basket.gap if n == timed else "<gap_0>" for n in starts]
            baskets += [
                replace(basket, items=basket.items[n : n + most], gap=gap) for n, gap in zip(starts, gaps, strict=True)
            ]
        first = 0
        while first < len(baskets):
            context = self._newest(baskets[:first], self.window // 2 - 1)
            room, end = self.window - 1 - sum(map(self._tokens, context)), first
            while end < len(baskets) and (self._tokens(baskets[end]) <= room or end == first):
                room -= self._tokens(baskets[end])
                end += 1
            if len(context) + end - first > 1 or len(baskets[first].items) > 1 or self.size > 1:
                yield self._row([*context, *baskets[first:end]], 1 + 2 * len(context))
            else:
                self.left_out += 1
            first = end

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
            "inside": self.inside,
            "values": {"days": days, "spend": spend},
        }

    def prompt(self, user: str, s: Split, now: float | None = None) -> dict[str, Any]:
        """Return a prompt row: the history, the baskets that followed (`future`), and their tokens (`told`).

        With `request_time` it has the time of the request, `now`: by default, that of the first basket that followed.
        """
        later = self.serialize((*s.before, *s.future))[len(s.before) :]
        if self.request_time and now is None and s.future:
            now = s.future[0].time
        return {
            "messages": [
                {"role": "user", "content": START + _text(self._newest(self.serialize(s.before, now), self.window - 1))}
            ],
            **({"now": now} if self.request_time else {}),
            "user": user,
            "history": sorted({item for basket in s.before for item in basket.items}),
            "future": [list(basket.items) for basket in s.future],
            "told": [_text([basket]) for basket in later],
        }

    def chat(self, s: Split, rng: np.random.Generator) -> dict[str, Any]:
        """Return a chat: the history as the user's message, and the next basket's items, in random order, as the
        response."""
        *known, basket = self.serialize((*s.before, s.future[0]))
        answer = "".join(basket.items[i] for i in rng.permutation(len(basket.items)))
        return {
            "messages": [
                {"role": "user", "content": START + _text(self._newest(known, self.window - 1))},
                {"role": "assistant", "content": answer},
            ]
        }

    def held_out_row(self, s: Split) -> dict[str, Any]:
        """Return a row with the history as context, followed by the held-out basket."""
        *before, last = self.serialize((*s.before, s.future[0]))
        last = replace(last, items=last.items[: self.window // 2 // self.size])
        context = self._newest(before, self.window - 1 - self._tokens(last))
        row = self._row([*context, last], 1 + 2 * len(context))
        for numbers in (row["events"], *row["values"].values()):
            del numbers[-1]  # the gap after the basket
        return row

    def _newest(self, baskets: Sequence[SerializedBasket], room: int) -> list[SerializedBasket]:
        """Return the newest baskets that fit into so many tokens.

        If the earlier ones have other items, a quarter of the room is for one basket of the newest of these, so that
        they remain items that the user had.
        """
        for share in (0, room // 4):
            kept, left = list[SerializedBasket](), room - share
            for basket in reversed(baskets):
                if self._tokens(basket) > left:
                    break
                kept.append(basket)
                left -= self._tokens(basket)
            have, earlier = {item for basket in kept for item in basket.items}, baskets[: len(baskets) - len(kept)]
            others = [item for basket in reversed(earlier) for item in basket.items if item not in have]
            if not others:
                return kept[::-1]
        most = max(1, (left + share - 1) // self.size)
        return [replace(earlier[-1], items=list(dict.fromkeys(others))[:most], days=None, spend=None), *kept[::-1]]

    def _tokens(self, basket: SerializedBasket) -> int:
        """Return the number of tokens of a basket, including its gap token."""
        return len(basket.items) * self.size + 1


def _text(baskets: Sequence[SerializedBasket]) -> str:
    return "".join("".join(basket.items) + basket.gap for basket in baskets)
