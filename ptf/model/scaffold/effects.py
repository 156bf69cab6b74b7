"""What other values of a setting do to the small model: to its logits, its parameters, or its list of layers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ptf.model.scaffold.reference import LAYERS, Reference, default_types

NONE = "no effect found on the logits"
LOGITS = "changes the logits"
PARAMETERS = "changes the parameters"
UNKNOWN = "cannot be changed in a small model"
COUNTED = 13  # layers, in which rules of several periods show


def others(value: Any) -> list[Any]:
    """Return other values that a setting may have."""
    if isinstance(value, bool):
        return [not value]
    return [value * 2 or 1, 0.5] if isinstance(value, int | float) else [3, 0.5, True]


def effect(reference: Reference, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return in what a small model with the settings `after` differs from one with `before`, of equal weights."""
    try:
        one, two = (reference.built(**changes) for changes in (before, after))
        if {n: p.shape for n, p in one.state_dict().items()} != {n: p.shape for n, p in two.state_dict().items()}:
            return PARAMETERS
        with torch.no_grad():
            tokens = torch.arange(1, 14)[None]
            logits = [model(input_ids=tokens, use_cache=False).logits for model in (one, two)]
    except Exception:  # a value that this setting cannot have: transformers raises a dozen kinds
        return UNKNOWN
    return NONE if torch.equal(*logits) else LOGITS


def effects(reference: Reference, keys: Iterable[str]) -> dict[str, str]:
    """Return what another value of each setting does to the small model."""
    found = {}
    for key in keys:
        tried = (effect(reference, {}, {key: other}) for other in others(reference.settings.get(key)))
        found[key] = next((what for what in tried if what != UNKNOWN), UNKNOWN)
    return found


def of_the_rule(reference: Reference, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each setting that counts only where a config.json lists no `layer_types`, because transformers makes the
    list of it; and the yes-or-no setting without which it counts for nothing, "" if there is none."""
    if not isinstance(types := reference.settings.get("layer_types"), list) or "layer_types" not in reference.defaults:
        return
    flags = [key for key, value in reference.defaults.items() if isinstance(value, bool)]
    lists = [types, ["full_attention"] * LAYERS]
    for key in keys:
        default = reference.defaults[key]
        values: list[Any] = [2, 3, *others(default)]
        if key in reference.given:
            values.append(reference.given[key])
        if isinstance(default, bool):
            values = [not default]
        switch = next((flag for flag in ("", *flags) if flag != key and _lists(reference, flag, key, values)), None)
        if switch is None:
            continue
        on: dict[str, Any] = {switch: not reference.defaults[switch]} if switch else {}
        found = {
            effect(reference, {**on, "layer_types": t, key: default}, {**on, "layer_types": t, key: value})
            for t in lists
            for value in values
        }
        if found - {UNKNOWN} == {NONE}:
            yield key, switch


def _lists(reference: Reference, flag: str, key: str, values: Iterable[Any]) -> bool:
    """Whether one of these values of a setting makes another list of layers, with the other value of a flag."""
    on = {flag: not reference.defaults[flag]} if flag else {}

    def types(**more: Any) -> list[str] | None:
        try:
            return default_types(reference.model_type, COUNTED, **on, **more)
        except Exception:  # a value that this setting cannot have
            return None

    before = types()
    return before is not None and any((after := types(**{key: value})) and after != before for value in values)
