"""LoRA (Hu et al. 2021): W x becomes W x + s · B A x, and only A and B are trained.

Adapters are decided where a projection is constructed (layers.LayerFactory), and lie beside the weight that they adapt:
`q_proj.lora_a` beside `q_proj.weight`, `experts.gate_proj_lora_a` [experts, rank, in] beside `experts.gate_proj`
[experts, out, in]. With B = 0 the model computes what its base does.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ptf.errors import UserError
from ptf.model.kernels.choice import PLAIN, Kernels
from ptf.model.quantised_weights import FORMS, QuantisedWeight, quantised_linear, quantised_weights
from ptf.model.sharded_tensor import fill, whole


@dataclass(frozen=True, slots=True)
class Lora:
    """The settings of a model's adapters."""

    rank: int = 16
    alpha: float = 32.0
    # patterns of unified names; by default all projections but routers and the head
    targets: tuple[str, ...] = ("layers.*_proj",)

    @property
    def scale(self) -> float:
        """The factor s: α / r."""
        return self.alpha / self.rank

    def adapts(self, path: str) -> bool:
        """Return whether the projection at this path gets an adapter.

        The head never does, because the losses use its weight directly, in chunks: it trains whole
        (`model.trainable`) or not at all.
        """
        return path != "head" and any(fnmatchcase(path, pattern) for pattern in self.targets)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The names of A [.., rank, in] and B [.., out, rank] beside a weight [.., out, in], and the factor s."""

    a: str
    b: str
    scale: float
    transposed: bool = False  # the weight is [in, out]


def attach(module: nn.Module, weight: str, lora: Lora, transposed: bool = False) -> Adapter:
    """Give a weight [.., out, in] of a module, or a `transposed` one, an adapter with B = 0; A gets its initial value
    later (`init_adapters`)."""
    shape = getattr(module, weight).shape
    *stacked, out, into = shape[::-1] if transposed else shape
    stem = "" if weight == "weight" else f"{weight}_"
    module.register_parameter(f"{stem}lora_a", Parameter(torch.zeros(*stacked, lora.rank, into)))
    module.register_parameter(f"{stem}lora_b", Parameter(torch.zeros(*stacked, out, lora.rank)))
    return Adapter(f"{stem}lora_a", f"{stem}lora_b", lora.scale, transposed)


class Linear(nn.Linear):
    """A projection, with an adapter if `lora` is given; the weight may be quantised (`quantise_weight`)."""

    lora_a: Parameter
    lora_b: Parameter

    def __init__(
        self, d_in: int, d_out: int, bias: bool = False, lora: Lora | None = None, kernels: Kernels = PLAIN
    ) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.kernels = kernels
        self.quantised: dict[str, QuantisedWeight] = {}
        self.adapters = {} if lora is None else {"weight": attach(self, "weight", lora)}
        self.adapted = True  # False inside `adapters_off`

    def forward(self, input: Tensor) -> Tensor:
        """Return the projection [.., out] of `input` [.., in], with the adapter's part unless adapters are off."""
        if self.quantised:
            y = quantised_linear(self, input)
        else:
            y = self.kernels.linear(input, self.weight, self.bias)
        if not self.adapters or not self.adapted:
            return y
        return y + self.adapters["weight"].scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def grouped(module: nn.Module, adapter: Adapter, x: Tensor, ends: Tensor) -> Tensor:
    """Return s · B A x with each token's expert, [n, out].

    `x` [n, in] is sorted by expert, `ends` [experts] is the end of each expert's rows. Grouped products need rows of a
    multiple of 16 bytes, so any other rank is padded with zeros.
    """
    a, b = getattr(module, adapter.a), getattr(module, adapter.b)
    if missing := -b.shape[-1] % (16 // b.element_size()):
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    low = F.grouped_mm(x, a.transpose(-2, -1), offs=ends)  # [n, rank]
    return adapter.scale * F.grouped_mm(low, b.transpose(-2, -1), offs=ends)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside the `with` block, where the model computes exactly what its base does.

    So a policy can serve as its own reference.
    """
    adapted: list[Any] = [m for m in model.modules() if getattr(m, "adapters", None) and m.adapted]
    for module in adapted:
        module.adapted = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapted = True


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapter of every adapted weight, by unified name; the adapter's names are unified names too."""
    result: dict[str, Adapter] = {}
    for path, module in model.named_modules():
        for weight, adapter in getattr(module, "adapters", {}).items():
            result[f"{path}.{weight}"] = replace(adapter, a=f"{path}.{adapter.a}", b=f"{path}.{adapter.b}")
    return result


def adapter_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that belong to adapters; no Hugging Face checkpoint has them."""
    return {name for adapter in adapters(model).values() for name in (adapter.a, adapter.b)}


def keyed(seed: int, name: str) -> int:
    """Return the seed of the initial value of a tensor, or of a component, by its name: sharding changes nothing."""
    return int.from_bytes(hashlib.sha256(f"init/{seed}/{name}".encode()).digest()[:8], "little") >> 1


def init_adapters(model: nn.Module, seed: int) -> None:
    """Initialise the adapters, which no checkpoint of the model has, keyed by seed and name.

    B is zero, so that the model computes what it does without them; A is uniform in ±1/√in, as in PEFT (He et al. 2015,
    a = √5).
    """
    for name in adapter_names(model):
        parameter = model.get_parameter(name)
        value = torch.zeros(parameter.shape)
        if not name.endswith("lora_b"):
            generator = torch.Generator().manual_seed(keyed(seed, name))
            value = value.uniform_(-1, 1, generator=generator) * value.shape[-1] ** -0.5
        fill(parameter, value.__getitem__)


def raise_if_unmatched_targets(model: nn.Module, lora: Lora, all_targets: nn.Module) -> None:
    """Raise UserError naming every target that adapts nothing.

    `all_targets` is the same model with the target `*`, which shows what can be adapted.
    """
    reached = [weight.removesuffix(".weight") for weight in adapters(model)]
    if unused := [pattern for pattern in lora.targets if not any(fnmatchcase(path, pattern) for path in reached)]:
        adaptable = kinds(weight.removesuffix(".weight") for weight in adapters(all_targets))
        raise UserError(
            f"model.lora.targets: {', '.join(unused)} matches nothing; there is {', '.join(adaptable)} (the head has "
            "no adapter: to train it whole, name it in model.trainable)"
        )


def kinds(names: Iterable[str]) -> list[str]:
    """Return names with `*` in place of numbers, each once."""
    return list(dict.fromkeys(".".join("*" if word.isdigit() else word for word in n.split(".")) for n in names))


def adapter_config(
    base: str, rank: int, scale: float, modules: list[str] | str, *, transposed: bool = False, **more: Any
) -> dict[str, Any]:
    """Return PEFT's adapter_config.json of adapters of these modules, with this rank in the file and this factor s."""
    alpha = scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": modules,
        **more,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def merged_weights(model: nn.Module, original: Callable[[str], Tensor] | None = None) -> Callable[[str], Tensor]:
    """Return a function that gives a whole tensor by unified name, with its adapter merged into it.

    A merged weight has the wider dtype of the two: fp32 where the adapter trains, also over a base that is held in
    bf16. There is never a second copy of the model. Every rank must ask for the same names in the same order, because
    each gathers its part. A quantised weight is what it is dequantised to, or what `original` returns for its name: the
    weight that was quantised.
    """
    pairs, quantised = adapters(model), quantised_weights(model)
    tensors = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}

    def weight(name: str) -> Tensor:
        if (of := quantised.get(name)) is None:
            base = whole(tensors[name])
        elif original is not None:
            base = original(name).to(tensors[of.codes].device)
        else:
            base = FORMS[of.form].dequantise(whole(tensors[of.codes]), whole(tensors[of.scales]), torch.float32)
        if (adapter := pairs.get(name)) is None:
            return base
        a, b = whole(tensors[adapter.a]), whole(tensors[adapter.b])
        update = adapter.scale * (b.float() @ a.float())
        update = update.t() if adapter.transposed else update
        return (base.float() + update).to(torch.promote_types(base.dtype, a.dtype))

    return weight
