"""Families by `model_type`: how a config.json becomes a DecoderConfig, and what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ptf.errors import UserError
from ptf.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor under two names; `{i}` runs over the layers. Played both ways."""

    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    ops: tuple[Rename, ...]

    def names(self, config: DecoderConfig) -> dict[str, str]:
        """Our parameter names → Hugging Face's, for a model of this size; a tied head has no tensor of its own."""
        table: dict[str, str] = {}
        for op in self.ops:
            if op.ours == "head.weight" and config.tied:
                continue
            for i in range(config.layers) if "{i}" in op.ours else (0,):
                table[op.ours.format(i=i)] = op.theirs.format(i=i)
        return table


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises UserError naming the nearest for one that is not there."""
    from ptf.model.families.qwen3 import QWEN3

    families = {f.model_type: f for f in (QWEN3,)}
    model_type = str(config.get("model_type"))
    if model_type not in families:
        near = get_close_matches(model_type, families, 1, 0.3)
        raise UserError(f"model_type {model_type!r} is not supported; ptf has {', '.join(families)}" + (f" (nearest: {near[0]})" if near else ""))
    return families[model_type]
