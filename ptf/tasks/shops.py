"""Public data as events: files in `events/` under the public data, of which `make data` writes all but the first.

online_retail      the first year of Online Retail II (D. Chen, UCI; CC BY 4.0), a gift shop
complete_journey   The Complete Journey (84.51°): groceries, simulated on real patterns, for education; not for research
movielens_100k     MovieLens 100k (GroupLens; for research, not to be redistributed): ratings, none of which repeats
"""

from typing import Any

from ptf.errors import UserError
from ptf.events import prepare as events
from ptf.tasks.tiny import public_file

# beginning of the files' names, and how their columns are named
SHOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "online_retail": (
        "online_retail_2009_2010",
        {"columns": {"user": "customer", "time": "unix_ts"}, "item_columns": {"value": "median_price"}},
    ),
    "complete_journey": ("complete_journey", {"columns": {"value": "value"}}),
    "movielens_100k": ("movielens_100k", {}),
}


def source(shop: str, data: str | None = None) -> dict[str, Any]:
    """Return the arguments of `ptf.events.prepare.read_events` that say where a shop's events are.

    The default of `data` is $PTF_DATA, or else ../shared/data. Raises UserError for an unknown shop or a missing file.
    """
    if shop not in SHOPS:
        raise UserError(f"shop must be one of {', '.join(SHOPS)}, not {shop!r}")
    name, columns = SHOPS[shop]
    files = {kind: str(public_file(data, f"events/{name}_{kind}.csv.gz")) for kind in ("events", "items")}
    return {**files, **columns}


def prepare(directory: str, *, shop: str, data: str | None = None, **arguments: Any) -> None:
    """Call `ptf.events.prepare.prepare` with `arguments` on the files of a shop."""
    events.prepare(directory, **source(shop, data), **arguments)
