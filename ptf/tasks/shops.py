"""The first year of Online Retail II (D. Chen, UCI; CC BY 4.0): the purchases of 4,285 customers of a gift shop, as
events."""

from pathlib import Path
from typing import Any

from ptf.events import prepare as events
from ptf.tasks.tiny import public_file


def files(data: str | None) -> tuple[Path, Path]:
    """Return the paths of the events and of the items. Raise UserError if one of them does not exist."""
    bought, items = (f"events/online_retail_2009_2010_{kind}.csv.gz" for kind in ("events", "items"))
    return public_file(data, bought), public_file(data, items)


def prepare(directory: str, *, data: str | None = None, **arguments: Any) -> None:
    """Call `ptf.events.prepare.prepare` with `arguments` on the files in `events/` under `data`.

    The default of `data` is $PTF_DATA, or else ../shared/data.
    """
    bought, items = files(data)
    events.prepare(
        directory,
        events=str(bought),
        items=str(items),
        columns={"user": "customer", "time": "unix_ts"},
        item_columns={"value": "median_price"},
        **arguments,
    )
