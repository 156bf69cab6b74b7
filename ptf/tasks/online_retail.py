"""The first year of Online Retail II (D. Chen, UCI; CC BY 4.0): the purchases of 4,285 customers of a gift shop, as
events."""

import os
from pathlib import Path
from typing import Any

from ptf.errors import UserError
from ptf.events import prepare as events


def files(data: str | None) -> tuple[Path, Path]:
    """Return the paths of the events and of the items. Raise UserError if one of them does not exist."""
    root = Path(data or os.environ.get("PTF_DATA") or "../shared/data") / "events"
    bought, items = (root / f"online_retail_2009_2010_{kind}.csv.gz" for kind in ("events", "items"))
    for name in (bought, items):
        if not name.is_file():
            raise UserError(f"there is no {name}; set PTF_DATA to the directory that has events/")
    return bought, items


def prepare(directory: str, *, data: str | None = None, **arguments: Any) -> None:
    """Call `ptf.events.prepare.prepare` with `arguments` on the files in `events/` under `data`.

    The default of `data` is $PTF_DATA, or else ../shared/data.
    """
    bought, items = files(data)
    columns = {"columns": {"user": "customer", "time": "unix_ts"}, "item_columns": {"value": "median_price"}}
    events.prepare(directory, events=str(bought), items=str(items), **columns, **arguments)
