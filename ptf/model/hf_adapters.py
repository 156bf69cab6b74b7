"""LoRA in models of transformers (`model.backend: hf`): which of its modules get an adapter, and the adapter as PEFT
stores it.

A module keeps its class, whose forward pass may be its own (Falcon), and gets the adapter's part on top. PEFT calls
modules as transformers does, so a file has the adapter's matrices as they are trained. Experts whose matrices are
stacked in one parameter are no modules, and get none.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import rename
from ptf.model.lora import Adapter, Lora, adapter_config, adapters, attach, kinds
from ptf.model.peft_format import PeftFormat

if TYPE_CHECKING:
    from ptf.model.hf_backend import HFDecoder

PREFIX = "hf."  # of the names of parameters: HFDecoder holds transformers' model as `hf`
ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}  # words of the names of modules that choose experts


# architectures whose `out_proj` PEFT does not adapt, because their kernels compute with its weight directly
STATE_SPACE = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}


class Adapted(nn.Module):
    """A linear module of transformers with an adapter; `_adapted` makes a subclass of the module's own class."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    adapters: dict[str, Adapter]
    adapted: bool

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's own output, with the adapter's part unless adapters are off."""
        y = super().forward(input, *args, **kwargs)
        if not self.adapted:
            return y
        return y + self.adapters["weight"].scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def adaptable(model: "HFDecoder") -> dict[str, Any]:
    """Return what can get an adapter, by transformers' name: linear modules of the layers, routers included.

    A weight that several modules share is left out, because each would add its adapter to it.
    """
    from transformers.pytorch_utils import Conv1D

    shared = Counter(id(p) for _, p in model.hf.named_parameters(remove_duplicate=False))
    inside = {id(m) for m in model.layers.modules()}
    return {
        path: module
        for path, module in model.hf.named_modules()
        if id(module) in inside
        and isinstance(module, nn.Linear | Conv1D)
        and module.weight.dim() == 2
        and shared[id(module.weight)] == 1
    }


def stacked_matrices(model: "HFDecoder") -> list[str]:
    """Return the kinds of parameters that hold the matrices of all experts, which get no adapter.

    They have three dimensions, as the filters of a convolution have, or bear the name.
    """
    inside, modules = {id(p) for p in model.layers.parameters()}, adaptable(model)
    names = []
    for name, parameter in model.hf.named_parameters():
        owner = name.rpartition(".")[0]
        convolves = isinstance(model.hf.get_submodule(owner), nn.Conv1d)
        stacked = parameter.dim() == 3 or (parameter.dim() == 2 and ".experts." in name)
        if id(parameter) in inside and stacked and not convolves and owner not in modules and "lora_" not in name:
            names.append(name)
    return kinds(names)


def adapt(model: "HFDecoder", lora: Lora) -> None:
    """Give adapters to the modules that the targets match: by default the linear modules of the layers but routers and
    what PEFT does not adapt.

    Raise UserError naming every target that adapts nothing, and what is there.
    """
    from transformers.pytorch_utils import Conv1D

    modules = adaptable(model)
    if lora.targets == Lora().targets:  # ptf's own names, of which a model of transformers has none
        chosen = {
            path: m
            for path, m in modules.items()
            if not ROUTERS & set(path.split(".")) and not _refused_by_peft(model, path)
        }
        unused = [] if chosen else list(lora.targets)
    else:
        chosen = {path: m for path, m in modules.items() if lora.adapts(path)}
        unused = [pattern for pattern in lora.targets if not any(fnmatchcase(path, pattern) for path in chosen)]
    model.raise_if_outside("model.lora.targets", lora.targets)
    if unused:
        stacked = [name for name in stacked_matrices(model) if any(fnmatchcase(name, pattern) for pattern in unused)]
        reason = f" ({', '.join(stacked)}: stacked matrices of experts, which get no adapter)" if stacked else ""
        raise UserError(
            f"model.lora.targets: {', '.join(unused)} matches nothing{reason}; in transformers' "
            f"{model.hf.config.model_type} there is {', '.join(kinds(modules)) or 'no linear module'} (the head has no "
            "adapter: to train it whole, name it in model.trainable)"
        )
    for module in chosen.values():
        transposed = isinstance(module, Conv1D)  # the weight of GPT-2's Conv1D is [in, out]
        module.adapters = {"weight": attach(module, "weight", lora, transposed)}
        module.adapted = True  # False inside `adapters_off`
        module.__class__ = _adapted(type(module))


def _refused_by_peft(model: "HFDecoder", path: str) -> bool:
    return model.text_config.model_type in STATE_SPACE and path.endswith(".out_proj")


@cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Adapted{kind.__name__}", (Adapted, kind), {})


def _paths(weights: Iterable[str]) -> list[str]:
    return [weight.removeprefix(PREFIX).removesuffix(".weight") for weight in weights]


def described(model: "HFDecoder") -> str:
    """Return what adapters adapt and what has none, for a run's first lines."""
    paths = _paths(adapters(model))
    line = f"lora: {len(paths)} adapters: {', '.join(kinds(paths))}"
    experts = stacked_matrices(model)
    return line + (f"; none for the stacked matrices {', '.join(experts)}" if experts else "")


def uncalled_kinds(model: "HFDecoder", called: Collection[str]) -> list[str]:
    """Return the kinds of adapted modules of which a forward pass called none.

    Of experts only those that a token was sent to are called, so a module that was not called proves nothing by itself.
    """
    names = [path for path, module in model.hf.named_modules() if getattr(module, "adapters", None)]
    return [kind for kind in kinds(names) if kind not in kinds(called)]


class HFPeftFormat(PeftFormat):
    """The adapters of a model of transformers in PEFT's format."""

    def __init__(self, model: "HFDecoder") -> None:
        super().__init__(model, [rename(weight, weight.removeprefix(PREFIX)) for weight in adapters(model)])
        self.decoder, self.paths = model, _paths(self.adapters)

    @override
    def obstacles(self) -> list[str]:
        return [
            *(f"{path} (PEFT does not adapt it)" for path in self.paths if _refused_by_peft(self.decoder, path)),
            *(f"{name.removeprefix(PREFIX)} (not an adapter)" for name in self.trained_beside()),
        ]

    @override
    def projections(self, names: Collection[str]) -> tuple[str, ...]:
        return tuple(path.removeprefix(PREFIX) for path in super().projections(names))

    def config(self, base: str) -> dict[str, Any]:
        """See PeftFormat.

        `target_modules` are the last words of modules that are adapted wherever they are, else whole names.
        """
        with self.decoder.outside.put_back():
            everywhere = [path for path, m in self.decoder.hf.named_modules() if hasattr(m, "weight")]
        adapted, there = (Counter(path.rpartition(".")[2] for path in paths) for paths in (self.paths, everywhere))
        targets = {leaf if adapted[leaf] == there[leaf] else p for p in self.paths for leaf in [p.rpartition(".")[2]]}
        transposed = any(adapter.transposed for adapter in self.adapters.values())
        return adapter_config(base, self.rank, self.lora.scale, sorted(targets), transposed=transposed)
