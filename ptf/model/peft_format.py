"""Adapters as PEFT and vLLM read them: `adapter_config.json` and `adapter_model.safetensors`.

A family's tensor mappings also determine how its adapters are stored. Where Hugging Face has one tensor for all
experts, PEFT has one pair of matrices, [experts · rank, in] and [out, rank · experts]. Projections that share a tensor
(gate and up of GPT-OSS; queries, keys and values of Phi-3) share an adapter of twice or three times the rank, of which
each uses its part and has zeros in the others. A file has one rank and one α, so narrower adapters are padded with
zeros.
"""

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from ptf.model.checkpoint_mapping import Concatenate, Interleave, Stack, TensorMapping, Transpose
from ptf.model.components import own_tensors
from ptf.model.lora import adapter_config, adapter_names, adapters
from ptf.model.quantised_weights import weight_shapes
from ptf.model.sharded_tensor import fill, whole

if TYPE_CHECKING:
    from ptf.model.mapped_model import MappedModel
    from ptf.model.model import Model

# PEFT 0.21.2 converts the experts of other families as it would those of this one, which it leaves out
EXPERTS_UNKNOWN = ("qwen2_moe",)
Pair = tuple[Tensor, Tensor]  # A [.., rank, in], B [.., out, rank]


def file_name(module: str, which: str) -> str:
    """Return the name in the file of the A or the B of a module."""
    return f"base_model.model.{module}.lora_{which}.weight"


class PeftFormat(ABC):
    """The adapters of one model, converted to PEFT's format and back.

    `mappings` are those of all of the model's tensors, whose names in a checkpoint begin with `prefix`.
    """

    def __init__(self, model: "Model", mappings: Sequence[TensorMapping], prefix: str = "") -> None:
        assert model.factory.lora is not None
        self.model, self.lora, self.adapters = model, model.factory.lora, adapters(model)
        self.parameters, self.shapes = dict(model.named_parameters()), weight_shapes(model)
        self.prefix, self.every_mapping = prefix, mappings
        self.mappings = [m for m in mappings if any(self._adapted_name(name) in self.adapters for name in m.ours)]
        # of the tensors in the file: that of the adapters, times how many projections share a tensor
        self.rank = self.lora.rank * max((len(mapping.ours) for mapping in self.mappings), default=1)

    @abstractmethod
    def obstacles(self) -> list[str]:
        """Return what is trained and cannot be expressed in this format; [] if everything can."""

    @abstractmethod
    def config(self, base: str) -> dict[str, Any]:
        """Return adapter_config.json, for the base model called `base`."""

    def trained_beside(self) -> list[str]:
        """Return the parameters that train and are no adapters."""
        of_adapters = adapter_names(self.model)
        return [n for n, p in self.parameters.items() if p.requires_grad and n not in of_adapters]

    def names(self) -> set[str]:
        """Return the names of all `tensors`."""
        return {file_name(module, which) for module in self._modules(*self.mappings) for which in "AB"}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the file, whole tensor in fp32). Every rank must iterate, because each gathers its part."""
        model: nn.Module = self.model
        if isinstance(model, FSDPModule):
            model.reshard()
        for mapping in self.mappings:
            written = self._write(mapping, [self._pair(name) for name in mapping.ours])
            for module, (a, b) in zip(self._modules(mapping), written, strict=True):
                missing = self.rank - a.shape[-2]
                a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
                if isinstance(mapping, Transpose | Interleave):  # one pair for all experts
                    a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
                yield file_name(module, "A"), a
                yield file_name(module, "B"), b

    def copy(self, tensor: Callable[[str], Tensor]) -> None:
        """Load this model's adapters from whole tensors by their names; the reverse of `tensors`."""
        for mapping in self.mappings:
            pairs = [self._stored(tensor, module, mapping) for module in self._modules(mapping)]
            for name, (a, b) in zip(mapping.ours, self._read(mapping, pairs), strict=True):
                if name in self.adapters:
                    adapter = self.adapters[name]
                    fill(self.parameters[adapter.a], a[..., : self.lora.rank, :].__getitem__)
                    fill(self.parameters[adapter.b], b[..., : self.lora.rank].__getitem__)

    def projections(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the projections, as patterns name them, whose tensors are among `names`."""
        return tuple(
            ours.removesuffix(".weight")
            for mapping in self.mappings
            if any(file_name(module, "A") in names for module in self._modules(mapping))
            for ours in mapping.ours
            if ours in self.adapters
        )

    def _adapted_name(self, name: str) -> str:
        """Return the name of an adapted weight that makes this weight part of the file.

        Experts are written all three together, because vLLM and PEFT know no others; any other weight stands for
        itself.
        """
        experts, dot, leaf = name.rpartition(".")
        if not experts.endswith(".experts") or not leaf.endswith("_proj"):
            return name
        return next((n for n in self.adapters if n.startswith(experts + dot)), name)

    def _modules(self, *mappings: TensorMapping) -> list[str]:
        """Return PEFT's names of the modules of these mappings that have an adapter in the file."""
        modules = []
        for mapping in mappings:
            names = [self.prefix + name.removesuffix(".weight") for name in mapping.theirs()]
            if isinstance(mapping, Transpose | Interleave):
                # PEFT wraps gate_up_proj first, and down_proj around that
                inside = ".base_layer" if isinstance(mapping, Interleave) else ""
                names = [name.rpartition(".")[0] + inside for name in names]
            modules += names
        return modules

    def _pair(self, name: str) -> Pair:
        """Return A and B of a weight in fp32, zero where it has no adapter."""
        if (adapter := self.adapters.get(name)) is not None:
            a, b = (whole(self.parameters[n]).detach().float() for n in (adapter.a, adapter.b))
            return a, b
        *experts, out, into = self.shapes[name]
        device = next(self.model.parameters()).device
        a, b = (*experts, self.lora.rank, into), (*experts, out, self.lora.rank)
        return torch.zeros(a, device=device), torch.zeros(b, device=device)

    def _write(self, mapping: TensorMapping, pairs: list[Pair]) -> list[Pair]:
        (a, b), *others = pairs
        if isinstance(mapping, Concatenate):
            return [(torch.cat([a for a, _ in pairs]), torch.block_diag(*(b for _, b in pairs)))]
        if isinstance(mapping, Stack):
            return list(zip(a.unbind(0), b.unbind(0), strict=True))
        if not isinstance(mapping, Interleave):
            return [(a, b)]
        ((a2, b2),) = others
        both = b.new_zeros(len(b), 2 * b.shape[1], 2 * b.shape[2])
        both[:, ::2, : b.shape[2]], both[:, 1::2, b.shape[2] :] = b, b2
        return [(torch.cat((a, a2), 1), both)]

    def _read(self, mapping: TensorMapping, pairs: list[Pair]) -> list[Pair]:
        if isinstance(mapping, Stack):
            return [(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))]
        if isinstance(mapping, Concatenate):
            ((a, b),), rank = pairs, self.lora.rank
            parts = zip(a[: rank * len(mapping.ours)].split(rank), b.split(mapping.rows), strict=True)
            return [(one, rows[:, i * rank : (i + 1) * rank]) for i, (one, rows) in enumerate(parts)]
        if not isinstance(mapping, Interleave):
            return pairs
        ((a, b),) = pairs
        half = a.shape[1] // 2
        return [(a[:, :half], b[:, ::2, :half]), (a[:, half:], b[:, 1::2, half:])]

    def _stored(self, tensor: Callable[[str], Tensor], module: str, mapping: TensorMapping) -> Pair:
        a, b = (tensor(file_name(module, which)) for which in "AB")
        if isinstance(mapping, Transpose | Interleave):
            experts = self.shapes[mapping.ours[0]][0]
            a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return a, b


class MappedPeftFormat(PeftFormat):
    """Those of a model that has its tensors by the mappings of its family."""

    def __init__(self, model: "MappedModel") -> None:
        super().__init__(model, model.mappings(), model.family.prefix)
        self.decoder = model

    @override
    def obstacles(self) -> list[str]:
        own = {*own_tensors(self.decoder)}
        obstacles = [f"{n} (not an adapter)" for n in self.trained_beside()]
        obstacles += [f"{n} (Hugging Face has no such projection)" for n in self.adapters if n in own]
        obstacles += [f"{n} (PEFT and vLLM adapt no routers)" for n in self.adapters if n.endswith(".router.weight")]
        if any(isinstance(mapping, Stack) for mapping in self.every_mapping):
            obstacles += [
                f"{n} (beside experts, PEFT would take it for one of them)"
                for n in self.adapters
                if (".mlp." in n or ".moe.shared" in n) and n not in own
            ]
        if self.decoder.family.model_type in EXPERTS_UNKNOWN:
            obstacles += [f"{n} (PEFT knows no experts of this family)" for n in self.adapters if ".experts." in n]
        return obstacles + [
            f"{mapping.ours[0]} (stored in a way that PEFT has no format for)"
            for mapping in self.mappings
            if isinstance(mapping, Concatenate) and mapping.dim == 1
        ]

    @override
    def config(self, base: str) -> dict[str, Any]:
        stacked = [mapping for mapping in self.mappings if isinstance(mapping, Transpose | Interleave)]
        parameters = {self.prefix + mapping.other for mapping in stacked}
        targets = self._target_modules(self._modules(*(m for m in self.mappings if m not in stacked)))
        return adapter_config(base, self.rank, self.lora.scale, targets, target_parameters=sorted(parameters) or None)

    def _target_modules(self, modules: list[str]) -> list[str] | str:
        """Return `target_modules`: the last word of modules that are adapted in every layer and of experts, else the
        whole name.

        For the text part of a multimodal model it is a regular expression, because the image part has modules of the
        same names, and transformers names modules otherwise than tensors.
        """
        if self.prefix:
            inside = "|".join(re.escape(n.removeprefix(f"{self.prefix}model.")) for n in modules)
            return rf".*{re.escape(self.prefix.strip('.'))}\b.*\.({inside})"

        def leaf(name):
            return name.rpartition(".")[2]

        in_model, adapted = Counter(map(leaf, self._modules(*self.every_mapping))), Counter(map(leaf, modules))
        return sorted({leaf(n) if ".experts." in n or adapted[leaf(n)] == in_model[leaf(n)] else n for n in modules})


def save(tensors: Iterator[tuple[str, Tensor]], config: Mapping[str, Any], directory: Path, *, writes: bool) -> None:
    """Write adapter files to a directory, in place of what is there.

    Every rank calls this function; the one that `writes` does.
    """
    whole_tensors = {}
    for name, tensor in tensors:
        if writes:
            whole_tensors[name] = tensor.to("cpu", copy=True).contiguous()
    if not writes:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    save_file(whole_tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
