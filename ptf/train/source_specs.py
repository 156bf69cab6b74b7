"""The sources of a config as the data layer reads them. It imports no torch: `prepare` describes sources with it."""

from typing import Any

from ptf.data.sources.rows import SourceSpec


def specs(sources: Any, epochs: int | None = None, verify_up_to: float = float("inf")) -> dict[str, SourceSpec]:
    """Return the config's sources as plain values; `epochs` applies to those that have none of their own."""
    return {
        name: SourceSpec(
            s.path,
            s.sampling_weight,
            s.kind,
            s.columns,
            s.limit,
            s.epochs or epochs,
            s.row_count,
            verify_up_to=verify_up_to,
        )
        for name, s in sources.items()
    }
