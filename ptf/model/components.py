"""The user's own components (`model.replace`, `model.head`): where they may stand, which of their tensors have no
Hugging Face name, and how those are initialised.

A tensor that has the name and shape of the one it replaces is loaded and exported as that one. Every other tensor goes
by its unified name, keeps the values that its constructor gave it, and is exported beside the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Slices
from ptf.model.config import DecoderConfig
from ptf.model.layers import LayerFactory
from ptf.model.lora import adapter_names, keyed, kinds
from ptf.model.quantised_weights import weight_shapes

if TYPE_CHECKING:
    from ptf.model.mapped_model import MappedModel

# prefix of unified names → the file of an export that holds them
FILES = {"head.": "head.safetensors", "layers.": "components.safetensors"}
# prefix of custom components' tensors in exports and weight syncs, so that no name equals one of Hugging Face's
OWN = "own:"


def file_of(name: str) -> str:
    """Return the file beside the model that holds the own tensor of this name."""
    return next(file for begins, file in FILES.items() if name.startswith(begins))


def abbreviated(names: Sequence[str]) -> str:
    """Return the first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")


def places(c: DecoderConfig) -> list[str]:
    """Return the unified names of everything that can be replaced."""
    inside = [("attn", "moe", "moe.experts") if layer.moe else ("attn", "mlp") for layer in c.layers]
    return [*(f"layers.{i}.{part}" for i, parts in enumerate(inside) for part in parts), "head"]


def raise_if_unmatched(c: DecoderConfig, factory: LayerFactory) -> None:
    """Raise UserError naming every pattern that replaces nothing."""
    used = {factory.pattern(place) for place in places(c)}
    if unused := [pattern for pattern in factory.replace if pattern not in used]:
        raise UserError(
            f"model.replace: {', '.join(unused)} matches nothing, or only what an earlier pattern replaces; "
            f"there is {', '.join(kinds(places(c)))} (layers 0…{len(c.layers) - 1})"
        )


def standard_shapes(model: "MappedModel") -> dict[str, torch.Size]:
    """Return the shapes of the parameters of a model like this one in which nothing is replaced, by name."""
    with torch.device("meta"):
        return {name: p.shape for name, p in type(model)(model.config).named_parameters()}


def own_tensors(model: "MappedModel") -> tuple[str, ...]:
    """Return the names of the parameters that have no Hugging Face name."""
    replaced = tuple(f"{path}." for path in model.factory.constructors)
    if not replaced:
        return ()
    usual = standard_shapes(model)
    adapters = adapter_names(model)
    mine = {name: shape for name, shape in weight_shapes(model).items() if name not in adapters}
    unlike = {n for n in mine if n.startswith(replaced) and mine[n] != usual.get(n)}
    if model.config.head == "custom":
        unlike |= {n for n in mine if n.startswith("head.")}
    for mapping in model.family.mappings_for(usual):  # a mapping of several tensors needs all of them
        if not set(mapping.ours) <= mine.keys() - unlike:
            unlike |= set(mapping.ours) & mine.keys()
    return tuple(n for n in mine if n in unlike)


def constructor_values(model: "MappedModel", names: Iterable[str], seed: int) -> dict[str, Tensor]:
    """Return the tensors of these names as their constructors leave them.

    They are drawn by seed and path, so they are the same however the model is sharded.
    """
    values: dict[str, Tensor] = {}
    wanted = set(names)
    for path, make in model.factory.constructors.items():
        if not any(name.startswith(f"{path}.") for name in wanted):
            continue
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(keyed(seed, path))
            module: nn.Module = make()
        values |= {n: p.detach() for name, p in module.named_parameters() if (n := f"{path}.{name}") in wanted}
    return values


def own_files(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Callable[[Slices], Tensor]]:
    """Return how to read the own tensors that an export left beside its checkpoint, by name; {} where there are none.

    Raise UserError unless they are exactly those of `shapes` whose names belong there: others are of another model.
    """
    readers: dict[str, Callable[[Slices], Tensor]] = {}
    for begins, file in FILES.items():
        if not (directory / file).is_file():
            continue
        wanted = {n: shape for n, shape in shapes.items() if n.startswith(begins)}
        with safe_open(directory / file, "pt") as stored:
            held = {n: tuple(stored.get_slice(n).get_shape()) for n in stored.keys()}  # noqa: SIM118
        if unlike := sorted(n for n in held.keys() | wanted.keys() if held.get(n) != wanted.get(n)):
            differences = "\n  ".join(
                f"{n}: {held.get(n, 'not there')}, the job makes {wanted.get(n, 'no such tensor')}" for n in unlike
            )
            raise UserError(
                f"model.path: {directory / file} is of a model with other components of its own (model.replace, "
                f"model.head):\n  {differences}"
            )
        readers |= {n: partial(_read, directory / file, n) for n in wanted}
    return readers


def _read(file: Path, name: str, part: Slices) -> Tensor:
    with safe_open(file, "pt") as stored:
        return stored.get_slice(name)[part] if part else stored.get_tensor(name)
