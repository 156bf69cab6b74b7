"""LoRA (Hu et al. 2021): W x becomes W x + s · B A x, and only A and B are trained.

The one idea: adapters are decided where a projection is made (layers.Parts), and lie beside the weight that they adapt: `q_proj.lora_a` beside
`q_proj.weight`, `experts.gate_proj_lora_a` [experts, rank, in] beside `experts.gate_proj` [experts, out, in]. With B = 0 the model is its base.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class Lora:
    """What the adapters of a model are."""

    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    targets: tuple[str, ...] = ("layers.*_proj",)  # patterns of unified names; these are all projections but routers and the head

    @property
    def scale(self) -> float:
        """α / r, or α / √r (rsLoRA, Kalajdzievski 2023), under which the update keeps its size as the rank grows."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, path: str) -> bool:
        """The head is read by the losses, in chunks and without an adapter: it trains whole (`model.train`) or not at all."""
        return path != "head" and any(fnmatchcase(path, pattern) for pattern in self.targets)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The names of A [.., rank, in] and B [.., out, rank] beside a weight [.., out, in], and the factor s."""

    a: str
    b: str
    scale: float


def attach(module: nn.Module, weight: str, lora: Lora) -> Adapter:
    """Give a parameter of a module an adapter, B = 0; A is drawn later (`drawn`)."""
    *stacked, out, into = getattr(module, weight).shape
    stem = "" if weight == "weight" else f"{weight}_"
    module.register_parameter(f"{stem}lora_a", Parameter(torch.zeros(*stacked, lora.rank, into)))
    module.register_parameter(f"{stem}lora_b", Parameter(torch.zeros(*stacked, out, lora.rank)))
    return Adapter(f"{stem}lora_a", f"{stem}lora_b", lora.scale)


class LoraLinear(nn.Linear):
    """A projection with an adapter."""

    lora_a: Parameter
    lora_b: Parameter

    def __init__(self, d_in: int, d_out: int, bias: bool, lora: Lora) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.adapters = {"weight": attach(self, "weight", lora)}
        self.adapted = True  # False inside `adapters_off`

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.adapted:
            return y
        return y + self.adapters["weight"].scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def grouped(module: nn.Module, adapter: Adapter, x: Tensor, ends: Tensor) -> Tensor:
    """s · B A x of each token's expert. x [n, in] sorted by expert, `ends` [experts] → [n, out]. Any rank will do: grouped products want rows of
    16 bytes, so it is filled up with zeros."""
    a, b = getattr(module, adapter.a), getattr(module, adapter.b)
    if missing := -b.shape[-1] % (16 // b.element_size()):
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    low = F.grouped_mm(x, a.transpose(-2, -1), offs=ends)  # [n, rank]
    return adapter.scale * F.grouped_mm(low, b.transpose(-2, -1), offs=ends)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes exactly what its base does: a policy is its own reference."""
    adapted = [m for m in model.modules() if getattr(m, "adapters", None) and m.adapted]
    for module in adapted:
        module.adapted = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in adapted:
            module.adapted = True  # type: ignore[assignment]


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Unified name of every adapted weight → its adapter, under unified names too."""
    found: dict[str, Adapter] = {}
    for path, module in model.named_modules():
        for weight, adapter in getattr(module, "adapters", {}).items():
            found[f"{path}.{weight}"] = Adapter(f"{path}.{adapter.a}", f"{path}.{adapter.b}", adapter.scale)
    return found


def adapter_names(model: nn.Module) -> set[str]:
    """The parameters that belong to adapters; no checkpoint of Hugging Face's has them."""
    return {name for adapter in adapters(model).values() for name in (adapter.a, adapter.b)}


def projection_of(weight: str) -> str:
    """The name by which patterns know what has this weight: `layers.0.attn.q_proj`, `layers.0.moe.experts.gate_proj`."""
    return weight.removesuffix(".weight")


def drawn(name: str, shape: torch.Size, seed: int) -> Tensor:
    """What an adapter's tensor begins as, keyed by seed and name: B zero, A uniform in ±1/√in, as in PEFT (He et al. 2015, a = √5)."""
    if name.endswith("lora_b"):
        return torch.zeros(shape)
    key = int.from_bytes(hashlib.sha256(f"init/{seed}/{name}".encode()).digest()[:8], "little") >> 1
    return torch.empty(shape).uniform_(-1, 1, generator=torch.Generator().manual_seed(key)) * shape[-1] ** -0.5


def refuse_unmatched_targets(model: nn.Module, lora: Lora, all_targets: nn.Module) -> None:
    """Raises UserError naming every target that adapts nothing. `all_targets`: the same model with the target `*`, which knows what there is."""
    reached = [projection_of(weight) for weight in adapters(model)]
    if unused := [pattern for pattern in lora.targets if not any(fnmatchcase(path, pattern) for path in reached)]:
        there = [projection_of(weight) for weight in adapters(all_targets)]
        kinds = dict.fromkeys(".".join("*" if word.isdigit() else word for word in path.split(".")) for path in there)
        raise UserError(f"model.lora.targets: {', '.join(unused)} matches nothing; there is {', '.join(kinds)} (the head trains whole: model.train)")


class Merged(Mapping[str, Tensor]):
    """Unified name → whole tensor, each adapter merged into its weight as it is asked for: never a second model. Every rank must ask alike,
    since each gathers its part."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = adapters(model)
        self.tensors = {name: p.detach() for name, p in model.named_parameters()}
        self.names = [name for name in self.tensors if name not in adapter_names(model)]

    def __getitem__(self, name: str) -> Tensor:
        weight = whole(self.tensors[name])
        if (adapter := self.pairs.get(name)) is None:
            return weight
        a, b = whole(self.tensors[adapter.a]).float(), whole(self.tensors[adapter.b]).float()
        return (weight.float() + adapter.scale * (b @ a)).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
