"""Rows for environments that need only a seed: the games of a library are made from it, so there are no data to
load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.errors import UserError


def prepare(directory: str, *, train: int = 1000, test: int = 100, first: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl` with a prompt and a `seed` in each row.

    The seeds are `first`, `first` + 1, …: `train` of them for training, then `test` others that are held out.
    """
    if train < 1 or test < 0 or first < 0:
        raise UserError(f"seeds need `train` of at least 1, `test` and `first` of at least 0, not {train, test, first}")
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for name, seeds in (("train", range(first, first + train)), ("test", range(first + train, first + train + test))):
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": str(seed), "seed": seed}) + "\n" for seed in seeds)
        )


def seed_of_row(row: Mapping[str, Any], seed: int) -> int:
    """Return the row's `seed`, so that all responses to a row play the same game; without one, the episode's seed."""
    own = row.get("seed")
    if own is not None and (isinstance(own, bool) or not isinstance(own, int) or own < 0):
        raise UserError(f"the column `seed` must hold whole numbers of at least 0, not {own!r}")
    return seed if own is None else own
