"""Who did what when, as histories: a user's baskets in the order of time.

The one idea: what is held out is decided on baskets, before anything is written or tokenized, so no row can hold what came after it.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf import storage
from ptf.data.blocks import Reader
from ptf.data.sources import rows_once
from ptf.errors import UserError

COLUMNS = ("user", "time", "item")
COUNTS = ("rows", "duplicates", "unknown", "single")


@dataclass(frozen=True, slots=True)
class Basket:
    """What a user did at one time; the order of the items means nothing."""

    time: float  # seconds
    items: tuple[str, ...]  # each once


History = tuple[Basket, ...]


@dataclass(frozen=True, slots=True)
class Histories:
    by_user: Mapping[str, History]  # in the order in which users first appear
    counts: Mapping[str, int]  # rows; of them `duplicates`, `unknown`; `single`: users with one event, who are left out


def table(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each row is, and the row: of csv or csv.gz (a header, then text), or of what sources may be (jsonl, parquet)."""
    if not path.endswith((".csv", ".csv.gz")):
        for place in rows_once(Reader(path)):
            yield place.where, place.read()
        return
    with storage.open_read(path) as raw:
        lines = io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw, encoding="utf-8", newline="")
        try:
            for row in csv.DictReader(lines):
                number = row.pop(None, None)
                if number is not None or None in row.values():
                    raise UserError(f"{path}: a row has {'more' if number else 'fewer'} fields than the header: {list(row.values())[:6]}")
                yield path, row
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} cannot be read as {'gzipped ' if path.endswith('.gz') else ''}csv of UTF-8: {error}") from None


def read(
    rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Mapping[str, str], known: Container[str], *, unknown: str = "error", order: str = "error"
) -> Histories:
    """Histories of rows (where, row). `columns`: `user`, `time` (a number of seconds) and `item` → what they are called there. `known`: the items of the
    catalogue; rows of another are an error, or with `unknown: drop` left out and counted. Rows of a user are in the order of time, or with
    `order: sort` are brought into it. The same item twice in a basket is one. Raises UserError naming the first row that is wrong."""
    for key, given, choices in (("unknown", unknown, ("error", "drop")), ("order", order, ("error", "sort"))):
        if given not in choices:
            raise UserError(f"{key} must be {' or '.join(choices)}, not {given!r}")
    if strange := columns.keys() - set(COLUMNS):
        raise UserError(f"columns: {', '.join(sorted(strange))} is none of {', '.join(COLUMNS)}")
    names = {name: columns.get(name, name) for name in COLUMNS}
    events: dict[str, list[tuple[float, str]]] = {}
    counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
    for number, (where, row) in enumerate(rows, 1):
        counts["rows"] += 1
        here = f"{where}, event {number}"
        if missing := [there for there in names.values() if absent(row.get(there))]:
            raise UserError(f"{here}: there is no {', '.join(missing)}; this row has {sorted(row)}")
        user, item = str(row[names["user"]]), str(row[names["item"]])
        try:
            time = float(row[names["time"]])
        except (TypeError, ValueError):
            time = float("nan")
        if not abs(time) < float("inf"):
            raise UserError(f"{here}: {names['time']} must be a number of seconds, not {row[names['time']]!r}")
        if item not in known:
            if unknown == "error":
                raise UserError(f"{here}: the item {item!r} is not in the catalogue (unknown: drop leaves such events out)")
            counts["unknown"] += 1
            continue
        seen = events.setdefault(user, [])
        if seen and time < seen[-1][0] and order == "error":
            raise UserError(f"{here}: the events of user {user!r} are not in the order of time: {time:.0f} after {seen[-1][0]:.0f} (order: sort sorts them)")
        seen.append((time, item))
    found = {}
    for user, seen in events.items():
        history = tuple(_baskets(sorted(seen, key=lambda event: event[0])))  # stable
        kept = sum(len(basket.items) for basket in history)
        counts["duplicates"] += len(seen) - kept
        counts["single"] += kept == 1
        if kept > 1:
            found[user] = history
    return Histories(found, counts)


def absent(value: Any) -> bool:
    """Whether a cell is empty, in csv, jsonl or parquet."""
    return value is None or value == "" or value != value  # NaN


def _baskets(events: Sequence[tuple[float, str]]) -> Iterator[Basket]:
    at: dict[float, dict[str, None]] = {}
    for time, item in events:
        at.setdefault(time, {})[item] = None
    return (Basket(time, tuple(items)) for time, items in at.items())


@dataclass(frozen=True, slots=True)
class Split:
    """Of one user."""

    before: History  # what may be trained on
    future: History  # what is held out: the basket to predict is its first


def split(history: History, hold_out: str | float) -> Split:
    """`last`: the last basket is held out. `before_last`: the one before it, and the last one is in neither part: to choose settings by, while `last`
    stays unseen. A number: all baskets from that time on."""
    if hold_out == "last":
        return Split(history[:-1], history[-1:])
    if hold_out == "before_last":
        return Split(history[:-2], history[-2:-1])
    if isinstance(hold_out, str):
        raise UserError(f"hold_out must be last, before_last or a time in seconds, not {hold_out!r}")
    cut = sum(basket.time < hold_out for basket in history)
    return Split(history[:cut], history[cut:])
