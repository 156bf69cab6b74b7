"""Components of the user's own (`model.replace`, `model.head`): where they may stand, which of their tensors Hugging Face has no name for, and
how those begin.

The one idea: a tensor that has the name and the shape of the one it replaces is that tensor, and loads and exports as usual. Every other goes
by its unified name, begins as its constructor leaves it, and is exported beside the model.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ptf.errors import UserError
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.families import Family
from ptf.model.layers import Parts
from ptf.model.lora import adapter_names
from ptf.model.ops import Slices

FILES = {"head.": "head.safetensors", "layers.": "components.safetensors"}  # beginnings of unified names → the file of an export
OWN = "own:"  # begins their names where they travel among Hugging Face's (an export, a weight sync), some of which look like ours


def file_of(name: str) -> str:
    """The file beside the model that holds the own tensor of this name."""
    return next(file for begins, file in FILES.items() if name.startswith(begins))


def places(c: DecoderConfig) -> list[str]:
    """The unified names of all that can be replaced."""
    within = lambda moe: ("attn", "moe", "moe.experts") if moe else ("attn", "mlp")  # noqa: E731
    return [*(f"layers.{i}.{part}" for i, kind in enumerate(c.kinds) for part in within(kind.moe)), "head"]


def refuse_unmatched(c: DecoderConfig, parts: Parts) -> None:
    """Raises UserError naming every pattern that replaces nothing."""
    used = {parts.pattern(place) for place in places(c)}
    if unused := [pattern for pattern in parts.replace if pattern not in used]:
        kinds = dict.fromkeys(".".join("*" if word.isdigit() else word for word in place.split(".")) for place in places(c))
        raise UserError(
            f"model.replace: {', '.join(unused)} matches nothing, or only what an earlier pattern has taken; there is {', '.join(kinds)} "
            f"(layers 0…{c.layers - 1})"
        )


def standard(c: DecoderConfig) -> dict[str, torch.Size]:
    """Name → shape of the parameters of a decoder in which nothing is replaced."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Decoder(c).named_parameters()}


def own_tensors(model: Decoder, family: Family) -> tuple[str, ...]:
    """The parameters that have no Hugging Face name."""
    inside = tuple(f"{path}." for path in model.parts.own)
    if not inside:
        return ()
    usual = standard(model.config)
    adapters = adapter_names(model)
    mine = {name: p.shape for name, p in model.named_parameters() if name not in adapters}
    unlike = {n for n in mine if n.startswith(inside) and mine[n] != usual.get(n)}
    if model.config.head == "declared":
        unlike |= {n for n in mine if n.startswith("head.")}
    for op in family.links(usual):  # an op of several tensors needs all of them
        if not set(op.ours) <= mine.keys() - unlike:
            unlike |= set(op.ours) & mine.keys()
    return tuple(n for n in mine if n in unlike)


def constructed(model: Decoder, names: Iterable[str], seed: int) -> dict[str, Tensor]:
    """The tensors of these names as their constructors leave them, drawn by seed and path: the same however the model is sharded."""
    found: dict[str, Tensor] = {}
    wanted = set(names)
    for path, make in model.parts.own.items():
        if not any(name.startswith(f"{path}.") for name in wanted):
            continue
        key = int.from_bytes(hashlib.sha256(f"init/{seed}/{path}".encode()).digest()[:8], "little") >> 1
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(key)
            module: nn.Module = make()
        found |= {n: p.detach() for name, p in module.named_parameters() if (n := f"{path}.{name}") in wanted}
    return found


def fill_buffers(model: Decoder) -> None:
    """Buffers of own components are what their constructors make; they are constants, for nothing trains or exports them."""
    for path, make in model.parts.own.items():
        module = model.get_submodule(path)
        if any(True for _ in module.buffers()):
            with torch.device("cpu"):
                made = dict(make().named_buffers())
            for name, buffer in module.named_buffers():
                buffer.copy_(made[name])


def own_files(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Callable[[Slices], Tensor]]:
    """How to read the own tensors that an export left beside its checkpoint, by name; {} where there are none. Raises UserError unless they are
    exactly those of `shapes` whose names belong there: other ones are of another model."""
    found: dict[str, Callable[[Slices], Tensor]] = {}
    for begins, file in FILES.items():
        if not (directory / file).is_file():
            continue
        wanted = {n: shape for n, shape in shapes.items() if n.startswith(begins)}
        with safe_open(directory / file, "pt") as stored:
            held = {n: tuple(stored.get_slice(n).get_shape()) for n in stored.keys()}  # noqa: SIM118
        if unlike := sorted(n for n in held.keys() | wanted.keys() if held.get(n) != wanted.get(n)):
            what = "\n  ".join(f"{n}: {held.get(n, 'not there')}, the job makes {wanted.get(n, 'no such tensor')}" for n in unlike)
            raise UserError(f"model.path: {directory / file} is of a model with other components of its own (model.replace, model.head):\n  {what}")
        found |= {n: partial(_read, directory / file, n) for n in wanted}
    return found


def _read(file: Path, name: str, part: Slices) -> Tensor:
    with safe_open(file, "pt") as stored:
        return stored.get_slice(name)[part] if part else stored.get_tensor(name)
