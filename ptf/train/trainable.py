"""Selection of what trains, by patterns of unified parameter names.

A pattern matches a parameter or any module that contains it, for example `embed`, `layers.3`, `layers.*.attn` and
`*.lora_b`.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.hf_adapters import PREFIX as FOREIGN
from ptf.model.lora import adapter_names, kinds
from ptf.model.model import Model
from ptf.model.quantised_weights import weight_shapes


def matches(name: str, pattern: str) -> bool:
    """Return whether the pattern matches a parameter's unified name, or a beginning of it that ends at a dot.

    In a model of transformers (`model.backend: hf`) these are transformers' names.
    """
    words = name.removeprefix(FOREIGN).split(".")
    return any(fnmatchcase(part, pattern) for part in accumulate(words, "{}.{}".format))


def raise_if_unmatched(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise UserError naming every pattern of the config's `key` that matches no parameter."""
    if unused := [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]:
        there = kinds(name.removeprefix(FOREIGN) for name in names)
        raise UserError(f"{key}: {', '.join(unused)} matches nothing; there is {', '.join(there)}")


def freeze(model: Model, patterns: Sequence[str] | None) -> None:
    """Freeze all parameters that no pattern matches; without patterns and LoRA, freeze none. Call it before sharding.

    Under LoRA these parameters train: the adapters, those that the patterns match, and those that no Hugging Face
    checkpoint holds (a head or components of the user's own, a scalar head), which would otherwise keep their random
    values. Raises UserError for a pattern that matches nothing.
    """
    adapters = adapter_names(model)
    if patterns is None and not adapters:
        return
    fixed = {name for name, p in model.named_parameters() if not p.is_floating_point()}  # no gradient trains them
    names = [name for name in weight_shapes(model) if name not in fixed | adapters]
    model.raise_if_outside("model.trainable", patterns or ())
    raise_if_unmatched("model.trainable", patterns or (), names)
    free = adapters | model.unstored_names() if adapters else set()
    for name, parameter in model.named_parameters():
        trains = name in free or any(matches(name, pattern) for pattern in patterns or ())
        parameter.requires_grad_(trains and name not in fixed)


def frozen_dtype(directory: Path, precision: str, *, exported: bool) -> torch.dtype:
    """Return the dtype in which weights that do not train are held.

    In bf16 the computation rounds them to it anyway. Weights that are `exported` must also lose nothing of the
    checkpoint in `directory`, into which adapters are merged; a checkpoint stored in bf16 has nothing to lose.
    """
    if precision == "bf16" and (not exported or model_files.export_dtype(directory) == torch.bfloat16):
        return torch.bfloat16
    return torch.float32


def hold_frozen(model: nn.Module, dtype: torch.dtype, exact: Collection[str] = ()) -> None:
    """Set the dtype of the weights that do not train, but those of `exact`; call it after `freeze`, before the model is
    sharded."""
    for name, parameter in model.named_parameters():
        # not the bytes of quantised weights
        if not parameter.requires_grad and parameter.is_floating_point() and name not in exact:
            parameter.data = parameter.data.to(dtype)
