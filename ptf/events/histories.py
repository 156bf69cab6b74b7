"""Events as histories: each user's baskets in the order of time.

Baskets are held out before anything is written or tokenized, so no training row contains held-out or later events.
"""

import json
import math
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ptf import storage
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import rows_once
from ptf.errors import UserError

COLUMNS = ("user", "time", "item")


@dataclass(frozen=True, slots=True)
class Basket:
    """The items of a user at one time; their order has no meaning."""

    time: float  # seconds
    items: tuple[str, ...]  # without repetitions


History = tuple[Basket, ...]


@dataclass(frozen=True, slots=True)
class Histories:
    """The histories of all users, and counts of the rows they were read from."""

    by_user: Mapping[str, History]  # in the order in which users first appear
    counts: Mapping[str, int]  # `rows`, `duplicates`, `unknown` items; `single`: users with one event, who are left out
    prices: Mapping[str, "array[float]"]  # of each item with events before `date`; none where the rows have no price


def table(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location of each row, and the row. The file is in a format of data sources (csv, jsonl, parquet)."""
    return ((row.where, row.read()) for row in rows_once(Reader(path)))


def read(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, str],
    known: Container[str],
    *,
    unknown: str = "error",
    order: str = "error",
    date: float = -math.inf,
) -> Histories:
    """Return the histories of rows, given as (location, row).

    `columns` maps `user`, `time` (a number of seconds) and `item` to their names in the rows, and `value` to the column
    of the item's price, if they have one. `known` has the items of the catalogue; a row with any other item is an
    error, or with `unknown="drop"` is left out and counted. The rows of a user must be in the order of time; with
    `order="sort"` they are sorted. An item that is repeated in a basket counts once. `prices` are those of all rows
    before `date`. Raises UserError, which names the first invalid row.
    """
    for key, value, choices in (("unknown", unknown, ("error", "drop")), ("order", order, ("error", "sort"))):
        if value not in choices:
            raise UserError(f"{key} must be {' or '.join(choices)}, not {value!r}")
    if strange := columns.keys() - {*COLUMNS, "value"}:
        raise UserError(f"columns: {', '.join(sorted(strange))} is none of {', '.join((*COLUMNS, 'value'))}")
    names = {name: name for name in COLUMNS} | dict(columns)
    events, by_user, prices = dict[str, list[tuple[float, str]]](), dict[str, History](), dict[str, "array[float]"]()
    counts: dict[str, int] = dict.fromkeys(("rows", "duplicates", "unknown", "single"), 0)
    for number, (where, row) in enumerate(rows, 1):
        counts["rows"] += 1
        here = f"{where}, event {number}"
        if missing := [column for column in names.values() if absent(row.get(column))]:
            raise UserError(f"{here}: the column {', '.join(missing)} is missing; this row has {sorted(row)}")
        user, item = str(row[names["user"]]), str(row[names["item"]])
        time, paid = _time_and_prices(row, names, here)
        if item not in known:
            if unknown == "error":
                raise UserError(
                    f"{here}: the item {item!r} is not in the catalogue (unknown: drop leaves such events out)"
                )
            counts["unknown"] += 1
            continue
        if time < date:
            prices.setdefault(item, array("d")).extend(paid)
        user_events = events.setdefault(user, [])
        if user_events and time < user_events[-1][0] and order == "error":
            raise UserError(
                f"{here}: the events of user {user!r} are not in the order of time: "
                f"{time:.0f} after {user_events[-1][0]:.0f} (order: sort sorts them)"
            )
        user_events.append((time, item))
    for user, user_events in events.items():
        baskets: dict[float, dict[str, None]] = {}
        for time, item in sorted(user_events, key=lambda event: event[0]):  # stable
            baskets.setdefault(time, {})[item] = None
        history = tuple(Basket(time, tuple(items)) for time, items in baskets.items())
        count = sum(len(basket.items) for basket in history)
        counts["duplicates"] += len(user_events) - count
        counts["single"] += count == 1
        if count > 1:
            by_user[user] = history
    return Histories(by_user, counts, prices)


def _time_and_prices(row: Mapping[str, Any], names: Mapping[str, str], here: str) -> tuple[float, list[float]]:
    """Return the time of a row, and its price in a list, which is empty where the rows have none."""
    time, prices = number_in(row[names["time"]]), [number_in(row[names["value"]])] if "value" in names else []
    if not abs(time) < math.inf:
        raise UserError(f"{here}: {names['time']} must be a number of seconds, not {row[names['time']]!r}")
    if not all(0 <= price < math.inf for price in prices):
        raise UserError(f"{here}: {names['value']} must be a number of at least 0, not {row[names['value']]!r}")
    return time, prices


def number_in(cell: Any) -> float:
    """Return a cell's number; NaN if it has none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.nan


def save(path: str, histories: Mapping[str, History]) -> None:
    """Write histories as jsonl: of each user the baskets, as pairs of a time and items."""
    rows = ({"user": user, "baskets": [(b.time, b.items) for b in history]} for user, history in histories.items())
    storage.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def load(path: str) -> dict[str, History]:
    """Read histories that `save` wrote, from a path or URI. Raises UserError if there are none."""
    try:
        rows = map(json.loads, storage.read_text(path).splitlines())
    except storage.Missing:
        raise UserError(f"there is no {path}, on which baselines are fitted; prepare the data again") from None
    return {row["user"]: tuple(Basket(time, tuple(items)) for time, items in row["baskets"]) for row in rows}


def absent(value: Any) -> bool:
    """Return whether a cell of a csv, jsonl or parquet file is empty."""
    return value is None or value == "" or value != value  # NaN


@dataclass(frozen=True, slots=True)
class Split:
    """A user's history in two parts."""

    before: History  # for training
    future: History  # held out; its first basket is to be predicted


def split(history: History, hold_out: str | float) -> Split:
    """Split a history.

    `last` holds out the last basket. `before_last` holds out the second to last one and drops the last one, so that
    settings can be chosen without using the `last` split. A number holds out all baskets from that time on.
    """
    match hold_out:
        case "last":
            return Split(history[:-1], history[-1:])
        case "before_last":
            return Split(history[:-2], history[-2:-1])
        case str():
            raise UserError(f"hold_out must be last, before_last or a time in seconds, not {hold_out!r}")
        case time:
            cut = sum(basket.time < time for basket in history)
            return Split(history[:cut], history[cut:])
