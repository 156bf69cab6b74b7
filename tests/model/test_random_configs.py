"""A family reads every setting that changes its model, or refuses it; and the verifier's random configs vary what it
reads: a setting that never varies is never verified."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from ptf.errors import UserError
from ptf.model.families import MODULES, Family, family_of
from ptf.model.reference import random_reference

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


def logits(c: Mapping[str, Any]) -> Tensor:
    """Return what transformers' model computes, with the same weights where the shapes are the same."""
    model = random_reference(deepcopy(dict(c)), 0).eval()  # transformers changes the mappings inside a config
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 25)[None], use_cache=False).logits


def ignored(family: Family, c: Mapping[str, Any]) -> set[Path]:
    """Return the settings of the language model that change transformers' logits, and that the mapping neither reads
    nor refuses."""
    mine, theirs, found = family.config(c), logits(c), set[Path]()
    for path, value in leaves({"text_config": c["text_config"]} if "text_config" in c else c):
        for other in others(value) or ["relu"]:  # a word that no family has
            with contextlib.suppress(Exception):  # refused; or transformers, which raises a dozen kinds, has it not
                if family.config(again := changed(c, path, other)) == mine and not torch.equal(logits(again), theirs):
                    found.add(path)
    return found


def without(c: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a config without a setting, and its language model without it."""
    return {k: without(v, key) if isinstance(v, dict) else v for k, v in c.items() if k != key}


@pytest.mark.parametrize("model_type", MODULES)
def test_a_setting_that_changes_the_model_is_read_or_refused(model_type: str) -> None:
    """In a config as transformers saves it, and in one without the list of layers, which other settings then make."""
    family = family_of({"model_type": model_type})
    for key in ("", "layer_types"):
        drawn = family.random_config(random.Random(f"without/{key}/{model_type}"))
        found = ignored(family, without(AutoConfig.for_model(**drawn).to_dict(), key))
        # transformers saves the share that is rotated twice, and ptf reads that of rope_parameters
        assert not {path for path in found if path[-1] != "partial_rotary_factor" or "rope_parameters" in path}


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "silu"), ("rms_norm_eps", 1e-6), ("attention_bias", False)])
def test_a_setting_that_a_mapping_ignores_is_found(key: str, value: Any) -> None:
    """The negative control."""
    llama = family_of({"model_type": "llama"})
    only = {name: one for name, one in llama.only.items() if name != key}
    deaf = replace(llama, only=only, decoder=lambda c: llama.decoder({**c, key: value}))
    c = AutoConfig.for_model(**llama.random_config(random.Random(1))).to_dict() | {key: value}
    assert ignored(deaf, c) == {(key,)}
    assert not ignored(llama, c)
