"""Online Retail II (D. Chen, UCI; CC BY 4.0), its first year: what 4,285 customers of a shop for gifts bought, as events."""

import os
from pathlib import Path
from typing import Any

from ptf.data import events
from ptf.errors import UserError


def prepare(directory: str, *, data: str | None = None, **knobs: Any) -> None:
    """`ptf.data.events.prepare` with `knobs`, of the files in `events/` under `data` (default: $PTF_DATA, else ../shared/data)."""
    root = Path(data or os.environ.get("PTF_DATA") or "../shared/data") / "events"
    names = [root / f"online_retail_2009_2010_{kind}.csv.gz" for kind in ("events", "items")]
    if missing := [str(name) for name in names if not name.is_file()]:
        raise UserError(f"there is no {missing[0]}; set PTF_DATA to the directory that has events/")
    events.prepare(
        directory, events=str(names[0]), items=str(names[1]), columns={"user": "customer", "time": "unix_ts"}, item_columns={"value": "median_price"}, **knobs
    )
