"""The weights of a model of transformers, read from a checkpoint in the slices that this process owns.

transformers' own table says how stored names become parameters (`conversion_mapping`). A tensor that is only renamed is
read slice by slice. Where parameters are computed from several tensors (experts that are stored one by one and
computed stacked), those of one parameter are read whole, converted and cut, so no process ever holds a whole model.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from ptf.model.checkpoint_mapping import Slices
from ptf.model.lora import adapter_names
from ptf.model.sharded_tensor import fill as fill_tensor
from ptf.model.tensor_files import TensorFiles, equal


class InMemory:
    """Tensors of a mapping, read as those of TensorFiles."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.names = tensors, set(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def read(self, name: str, part: Slices) -> Tensor:
        """Return a slice of a tensor."""
        return self.tensors[name][part]


def fill_from(
    hf: Any,
    stored: TensorFiles | InMemory,
    *,
    lacks: Collection[str] = (),
    ignores: Callable[[str], bool] = lambda _: False,
    carried: Collection[str] = (),
) -> tuple[tuple[str, ...], list[str]]:
    """Fill the parameters and the stored buffers of transformers' model, but adapters.

    `lacks` may be missing, and `ignores` says which tensors may be unexpected. `carried` are parameters that are not
    filled and may be missing. Return the names of `lacks` that are missing, and a line for each tensor that is missing,
    unexpected or misshapen.
    """
    targets = targets_of(hf)
    renamed, groups, unexpected = assigned(hf, stored.names, targets, carried)
    filled, problems = set[int](), list[str]()

    def fill(name: str, shape: tuple[int, ...], source: str, read: Callable[[Slices], Tensor]) -> None:
        target = targets[name]
        if tuple(target.shape) != shape:
            problems.append(f"wrong shape: {source} is {shape}, the config says {tuple(target.shape)}")
        elif id(target) not in filled:
            fill_tensor(target, read)
        filled.add(id(target))

    read_from: dict[int, str] = {}  # parameter → its tensor
    for name, source in renamed.items():
        first = read_from.setdefault(id(targets[name]), source)
        if first != source and not equal(stored, first, source):
            problems.append(f"unlike: {source} is not {first}, to which the config ties it")
        fill(name, stored.shape(source), source, partial(stored.read, source))
    for name, (converter, sources) in groups.items():
        for source, pattern in sources:
            converter.add_tensor(
                name, source, pattern, stored.read(source, tuple(slice(0, n) for n in stored.shape(source)))
            )
        try:
            made = converter.convert(name, model=hf, config=hf.config)
        except Exception as error:  # whatever a conversion raises, the tensors do not fit
            problems.append(f"cannot be converted: {name}: {type(error).__name__}: {error}")
            filled.add(id(targets[name]))
            continue
        for made_name, tensor in made.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            fill(made_name, tuple(tensor.shape), made_name, tensor.__getitem__)
    missing = [name for name, target in targets.items() if id(target) not in filled and name not in carried]
    own = {id(target) for name, target in targets.items() if name in lacks}
    ignored = [re.compile(pattern) for pattern in _ignored(hf)]
    surplus = [n for n in unexpected if not ignores(n) and not any(pattern.search(n) for pattern in ignored)]
    problems += [f"missing: {n}" for n in sorted(missing) if id(targets[n]) not in own]
    problems += [f"unexpected: {n}" for n in sorted(surplus)]
    return tuple(n for n in missing if id(targets[n]) in own), problems


def _ignored(hf: Any) -> list[str]:
    """Return patterns of the tensors that transformers ignores: layers that predict further tokens, and what older
    checkpoints have beside the parameters."""
    c = hf.config.get_text_config()
    after = range(c.num_hidden_layers, c.num_hidden_layers + (getattr(c, "num_nextn_predict_layers", None) or 0))
    return [
        *(hf._keys_to_ignore_on_load_unexpected or ()),
        *(rf"(^|\.)layers\.{layer}\." for layer in after),
        r"(^|\.)mtp(_\w+)?\.",
        r"rotary_emb\.inv_freq$",
    ]


def targets_of(hf: Any) -> dict[str, Tensor]:
    """Return what a checkpoint stores: parameters but adapters, and buffers that are part of the model's state."""
    without = adapter_names(hf)
    everything = dict(hf.named_parameters(remove_duplicate=False)) | dict(hf.named_buffers(remove_duplicate=False))
    return {name: everything[name] for name in hf.state_dict() if name not in without}


Groups = dict[str, tuple[Any, list[tuple[str, str]]]]  # parameter → converter, (stored name, pattern) of its tensors


def assigned(
    hf: Any, names: Collection[str], targets: Mapping[str, Tensor], carried: Collection[str]
) -> tuple[dict[str, str], Groups, list[str]]:
    """Return the stored name of each parameter that is only renamed, the others' converters, and what has no place; of
    the parameters of `carried` nothing.

    As transformers' `convert_and_load_state_dict_in_model` assigns them; the conversions that were used are left in the
    model, where `revert_weight_conversion` expects them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(hf)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known: Any = dict(targets)
    prefix = hf.base_model_prefix
    renamed, unexpected = dict[str, str](), list[str]()
    groups: Groups = {}
    for name in sorted(names, key=dot_natural_key):
        ours, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if ours not in targets and name in targets:
            ours, pattern = rename_source_key(name, [], [], prefix, known)
        if ours not in targets:
            unexpected.append(ours)
        elif ours in carried:
            continue
        elif pattern is None:
            renamed.setdefault(ours, name)
        else:
            groups.setdefault(ours, (deepcopy(by_pattern[pattern]), []))[1].append((name, pattern))
    hf._weight_conversions = [one for one in conversions if one.was_used()]
    return renamed, groups, unexpected


def in_stored_form(hf: Any, names: Collection[str], value: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, tensor) of the parameters of these names, whose tensors `value` returns: in groups
    whose stored form depends on no other."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )

    conversions = getattr(hf, "_weight_conversions", None)
    if conversions is None:  # those that `revert_weight_conversion` reverts then
        conversions = [
            one for one in get_model_conversion_mapping(hf, add_legacy=False) if not isinstance(one, PrefixChange)
        ]
    inverted = [one.reverse_transform() for one in reversed(conversions)]
    converters = [one for one in inverted if isinstance(one, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):
        groups.setdefault(rename_source_key(name, [], converters)[0], []).append(name)
    for group in groups.values():
        yield from revert_weight_conversion(hf, {name: value(name) for name in group}).items()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Construct modules inside the `with` block with parameters on the meta device and buffers that hold values.

    `torch.device("meta")` would take the values of both. A parameter has memory until it is registered.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
