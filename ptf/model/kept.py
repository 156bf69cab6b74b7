"""How many bytes of activations a layer keeps for its backward, for each token, found by running its own parts without memory (meta device).

The one idea: autograd is asked what it saves, so the count follows the modules: adapters, frozen weights, biases and types included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ptf.model.attention import Attention
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Block
from ptf.model.layers import Parts
from ptf.model.moe import Experts, MixtureOfExperts
from ptf.model.recompute import KEPT, Recompute
from ptf.model.rope import rotary

TOKENS = 256


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes a token, in one layer of one rank of a tensor group."""

    everything: float
    products: float  # with `selective`: what matrix products and attention gave
    input: float  # with `block`

    def of(self, how: Recompute) -> float:
        return {"none": self.everything, "selective": self.products + self.input, "block": self.input}[how]


class _Seen(Function):
    """Attention that keeps what fused kernels keep: queries, keys, values, output, and a log-sum-exp for each query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out


class _Products(TorchDispatchMode):
    """Adds up the outputs of the operations that `selective` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in KEPT:
            self.bytes += out.nbytes
        return out


def _run(module: nn.Module, call: Callable[[], Any]) -> tuple[float, float]:
    """Bytes a token that `call` has autograd keep, and that its matrix products give; parameters are no activations."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept: dict[int, Tensor] = {}  # by storage; a storage stays known because its tensor is held

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            kept[t.untyped_storage()._cdata] = t
        return t

    with _Products() as products, saved_tensors_hooks(pack, lambda t: t):
        held = call()
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
    del held
    return bytes_kept / TOKENS, products.bytes / TOKENS


def kept(c: DecoderConfig, layer: int, parts: Parts, dtype: torch.dtype, ranks: int, like: nn.Module) -> Kept:
    """Of `layer` over a tensor group of `ranks`; what trains in it is what trains in `like`. Components of the user's own count as one rank's."""
    moe = c.moe and replace(c.moe, experts=c.moe.experts // ranks)
    local = replace(c, heads=c.heads // ranks, kv_heads=c.kv_heads // ranks, hidden=c.hidden // ranks, moe=moe)
    with torch.device("meta"):
        block = Block(local, layer, parts, f"layers.{layer}").to(dtype)
        x = torch.empty(1, TOKENS, c.dim, dtype=dtype, requires_grad=True)
        table = rotary(torch.arange(TOKENS)[None], c.head_dim, c.kinds[layer].rope)
        trained = {name for name, p in like.named_parameters() if p.requires_grad}
        for name, p in block.named_parameters():
            p.requires_grad_(name in trained)
        norms = [_run(m, lambda m=m: m(x.clone())) for m in (block.attn_norm, block.attn_post_norm, block.mlp_norm, block.mlp_post_norm)]
        inside = [_run(block.attn, lambda: block.attn(x.clone(), table, _attend)), _feed(block, x, c, ranks)]
    size = c.dim * x.element_size()
    heads = c.heads // ranks
    attended = heads * (c.head_dim * x.element_size() + 4) if isinstance(block.attn, Attention) else 0  # its output and log-sum-exp
    everything = sum(n[0] for n in norms) / ranks + sum(i[0] for i in inside)
    return Kept(everything, sum(i[1] for i in inside) + attended, size / ranks)


def _attend(of: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Seen.apply(q, k, v)  # type: ignore[return-value]


def _feed(block: Block, x: Tensor, c: DecoderConfig, ranks: int) -> tuple[float, float]:
    """The MLP, or the mixture: how many rows an expert gets cannot be known without values, so every rank is given an equal share of them."""
    if block.moe is None:
        return _run(block.mlp, lambda: block.mlp(x.clone()))  # type: ignore[arg-type, misc]
    if not isinstance(block.moe, MixtureOfExperts) or not isinstance(block.moe.experts, Experts):
        return 0.0, 0.0
    assert c.moe is not None
    experts, rows = block.moe.experts.to(torch.bfloat16), TOKENS * c.moe.top_k  # the meta device has grouped products in bf16 alone
    here = torch.empty(rows // ranks, c.dim, dtype=torch.bfloat16, requires_grad=True)
    ends, expert = torch.empty(c.moe.experts // ranks, dtype=torch.int32), torch.empty(rows // ranks, dtype=torch.int64)
    inside = [x.element_size() / 2 * n for n in _run(experts, lambda: experts(here.clone(), ends, expert))]
    around = rows * c.dim * x.element_size() + 4 * TOKENS * c.moe.experts + 2 * 8 * rows  # results to be weighted, probabilities, indices
    return inside[0] + around / TOKENS + c.dim * x.element_size(), inside[1]
