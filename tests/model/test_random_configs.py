"""The verifier's random configs vary every setting that a family's mapping reads: one that never varies is never
verified."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from transformers import AutoConfig

from ptf.errors import UserError
from ptf.model.families import MODULES, Family, family_of

DRAWN = 150
UNSEEN = {"max_position_embeddings", "initializer_range"}  # no logit and no gradient depends on them
# settings that YaRN may have
YARN = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True}
Path = tuple[str, ...]


def leaves(c: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every setting that is not a mapping, by its keys."""
    for key, value in c.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def changed(c: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return the config with another value of one setting."""
    key, *rest = path
    inside = changed(c.get(key) or {}, tuple(rest), value) if rest else value
    return {**c, key: inside}


def others(value: Any) -> list[Any]:
    """Return other values of the kind of this one; [] for words, which name what is implemented or not."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 or 1, value + 1]
    if isinstance(value, list):
        return [value[1:] + value[:1], [1 - v if v in (0, 1) else v for v in value]]
    return [] if isinstance(value, str) else [3, 0.5]


def read(family: Family, c: dict[str, Any]) -> set[Path]:
    """Return the settings, of this config and of transformers' defaults, that change what the mapping returns."""
    mine, found, given = family.config(c), set(), dict(leaves(c))
    optional = {(*path[:-1], key): YARN[key] for path, value in given.items() if value == "yarn" for key in YARN}
    for path, value in {**dict(leaves(AutoConfig.for_model(**c).to_dict())), **optional, **given}.items():
        for other in others(value):
            with contextlib.suppress(UserError, TypeError, ValueError, KeyError, ZeroDivisionError):
                if family.config(changed(c, path, other)) != mine:
                    found.add(path)
    return {path for path in found if path[-1] not in UNSEEN}


@pytest.mark.parametrize("model_type", MODULES)
def test_every_setting_that_the_mapping_reads_varies(model_type: str) -> None:
    family = family_of({"model_type": model_type})
    configs = [family.random_config(random.Random(f"varied/{model_type}/{number}")) for number in range(DRAWN)]
    settings = set().union(*(read(family, c) for c in configs[:8]))
    values = {path: {repr(dict(leaves(c)).get(path)) for c in configs} for path in settings}
    assert len(settings) >= 10, "negative control: nothing was read"
    assert sorted(path for path, seen in values.items() if len(seen) < 2) == []
