"""The bytes of activations per token that a layer saves for its backward pass, measured on the meta device.

Autograd reports what it saves, so the count follows the modules: adapters, frozen weights, biases and dtypes included.
A compiled function saves less than its operations do one by one, because the backward pass computes again what costs
only arithmetic (Chen et al., 2016, as a minimum cut); `as_compiled` says what is left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptf.model.attention import Attention, LatentAttention
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Block
from ptf.model.gated_delta import GatedDeltaNet
from ptf.model.kernels.attention import PackedDelta
from ptf.model.kernels.choice import Kernels
from ptf.model.kernels.elementwise import normalised
from ptf.model.layers import LayerFactory
from ptf.model.moe import Experts, MixtureOfExperts
from ptf.model.recompute import SAVED, Recompute
from ptf.model.rope import rotary, rotate

TOKENS = 256


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes of activations a token, in one layer of one rank of a tensor group."""

    everything: float  # with `none`
    products: float  # with `selective`: the outputs of matrix products, and what attention keeps
    input: float  # with `block`: the layer's input; with `offload` it is in host memory
    # what the feed-forward part holds for a moment beside what is saved, in its forward and in its backward pass
    in_forward: float = 0.0
    in_backward: float = 0.0

    def of(self, mode: Recompute) -> float:
        """Return the bytes per token on the device under a mode of activation checkpointing."""
        return {
            "none": self.everything,
            "selective": self.products + self.input,
            "block": self.input,
            "offload": 0.0,
        }[mode]


class _Saving(Function):
    """A function of tensors that saves `kept`, and if told so its output, which has no values."""

    @staticmethod
    def forward(ctx: Any, kept: list[Tensor], shape: torch.Size, output: bool, *tensors: Tensor) -> Tensor:
        out = tensors[0].new_empty(shape)
        ctx.save_for_backward(*kept, *[out] * output)
        return out


def as_compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return, for a function of `Kernels.compile`, one that saves what Inductor's min-cut partitioner saves of it.

    A gate keeps its inputs; a norm, too, with the reciprocal root mean square of each row in fp32; a rotation keeps its
    tables in the dtype of what it rotates. tests/model/test_activation_memory.py compares this with the partitioner.
    """

    def call(*args: Any) -> Tensor:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        x, kept = tensors[0], tensors
        if function is rotate:
            kept = [table.to(x.dtype) for table in tensors[1:]]
        elif function is normalised:
            kept = [*tensors, x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))]
        return cast("Tensor", _Saving.apply(kept, x.shape, False, *tensors))

    return call


class _Products(TorchDispatchMode):
    """Adds up the sizes of the outputs of the operations that `selective` saves."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in SAVED:
            self.bytes += out.nbytes
        return out


def _run(module: nn.Module, call: Callable[[], Any]) -> tuple[float, float]:
    """Return the bytes per token that `call` makes autograd save, and those of the outputs of its matrix products.

    Parameters are not activations, and are not counted.
    """
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    saved: dict[int, Tensor] = {}  # by storage; holding the tensor keeps its storage's address from being used again

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            saved[t.untyped_storage()._cdata] = t
        return t

    with _Products() as products, saved_tensors_hooks(pack, lambda t: t):
        output = call()
    saved_bytes = sum(t.untyped_storage().nbytes() for t in saved.values())
    del output
    return saved_bytes / TOKENS, products.bytes / TOKENS


def activation_bytes(
    c: DecoderConfig,
    layer: int,
    factory: LayerFactory,
    dtype: torch.dtype,
    ranks: int,
    like: nn.Module,
    *,
    contexts: int = 1,
    compiled: bool,
) -> ActivationBytes:
    """Return the bytes of activations that `layer` saves on one of `ranks` ranks of a tensor group, for each token of
    this rank where `contexts` ranks divide the sequences.

    The parameters that train are those that train in `like`. With `compiled`, norms, gates and rotary embeddings are
    compiled. A component of the user's own counts as on one rank.
    """
    shared = c.moe.shared_intermediate_size // ranks if c.moe else 0
    moe = c.moe and replace(c.moe, experts=c.moe.experts // ranks, shared_intermediate_size=shared)
    local = replace(
        c, heads=c.heads // ranks, kv_heads=c.kv_heads // ranks, intermediate_size=c.intermediate_size // ranks, moe=moe
    )
    if compiled:
        factory = replace(factory, kernels=Kernels().compile(as_compiled))
    with torch.device("meta"):
        block = Block(local, layer, factory, f"layers.{layer}").to(dtype)
        x = torch.empty(1, TOKENS, c.dim, dtype=dtype, requires_grad=True)
        table = rotary(torch.arange(TOKENS)[None], c.rotary_dim, c.layers[layer].rope)
        trained = {name for name, p in like.named_parameters() if p.requires_grad}
        for name, p in block.named_parameters():
            p.requires_grad_(name in trained)
        norms = [
            _run(m, lambda m=m: m(x.clone()))
            for m in (block.attn_norm, block.attn_post_norm, block.mlp_norm, block.mlp_post_norm)
        ]
        attention = _run(block.attn, lambda: block.attn(x.clone(), table, CountedAttend(TOKENS, contexts=contexts)))
        if isinstance(block.attn, GatedDeltaNet):  # what the rule computes inside is not saved with `selective`
            attention = attention[0], _run(block.attn, lambda: block.attn(x.clone(), table, CountedAttend(0)))[1]
        saved, of_products, *beside = _feed(block, x, c, local, ranks)
    size = c.dim * x.element_size()
    attended = (
        _attended(block.attn, local, x.element_size(), contexts)
        if isinstance(block.attn, Attention | LatentAttention)
        else 0
    )
    everything = sum(n[0] for n in norms) / ranks + attention[0] + saved
    return ActivationBytes(everything, attention[1] + of_products + attended, size / ranks, *beside)


def _attended(attn: Any, local: DecoderConfig, element: int, contexts: int = 1) -> int:
    """Return the bytes that attention keeps with `selective`: rotated queries and keys, its output, its log-sum-exp.

    Values are what their projection put out, unless adapters add to it; in latent attention that is also keys. With
    sinks, the output is kept before and after their share is taken. Where ranks exchange heads, keys and values are not
    what the projections put out.
    """
    latent = local.latent is not None
    adapted = bool((attn.kv_b_proj if latent else attn.v_proj).adapters)
    outputs, kv_heads = 1 if attn.sinks is None else 2, max(local.kv_heads, contexts)
    keys = local.heads + kv_heads
    values = local.heads * outputs + kv_heads * (adapted or contexts > 1)
    unrotated = (adapted and latent and contexts == 1) * local.heads * (local.head_dim - local.rotary_dim)
    return (keys * local.head_dim + values * local.value_dim + unrotated) * element + 4 * local.heads * outputs


class CountedAttend:
    """An `Attend` that saves what training saves, over one document of `tokens` tokens; with 0, linear attention is
    left out. Of several `contexts`, ranks that exchange heads, each has a key-value head at least."""

    def __init__(self, tokens: int, device: str = "meta", contexts: int = 1) -> None:
        self.contexts = contexts
        with torch.device("cpu"):
            self.packed = PackedDelta(torch.zeros(1, tokens), torch.arange(tokens)[None]) if tokens else None
        if self.packed is not None:
            self.packed.positions = self.packed.positions.to(device)
            self.packed.chunks = self.packed.chunks.to(torch.device(device))

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Save what fused kernels save: queries, keys, values, output, and a log-sum-exp for each query and head."""
        shape = *q.shape[:-1], v.shape[-1]
        if self.contexts > 1:  # what is exchanged is another tensor
            k, v = (t.new_empty(*t.shape[:2], max(t.shape[2], self.contexts), t.shape[3]) for t in (k, v))
        kept = [q, k, v, q.new_empty(q.shape[:-1], dtype=torch.float32)]
        out = _Saving.apply(kept, shape, True, q, k, v)
        return cast("Tensor", out if self.contexts == 1 else _Saving.apply([], shape, False, out))

    def delta(self, layer: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See Attend."""
        if self.packed is not None:
            return self.packed(layer, qkv, decay, beta)[0]
        c = layer.config
        return qkv.new_empty(*qkv.shape[:2], c.value_heads, c.value_dim).requires_grad_()


def _feed(
    block: Block, x: Tensor, c: DecoderConfig, local: DecoderConfig, ranks: int
) -> tuple[float, float, float, float]:
    """Return the bytes per token of a layer's MLP or mixture of experts: what is saved, the outputs of its matrix
    products, and what it holds beside what is saved, at most, in its forward and in its backward pass.

    A rank of a tensor group saves all rows, of which its own experts compute a part.
    """
    element = x.element_size()
    if block.moe is None:
        mlp = cast("nn.Module", block.mlp)
        # backward: the gradients of the gate's output, and of one of its inputs
        return *_run(mlp, lambda: mlp(x.clone())), 0.0, 2 * local.intermediate_size * element
    if not isinstance(block.moe, MixtureOfExperts) or not isinstance(block.moe.experts, Experts):
        return 0.0, 0.0, 0.0, 0.0
    assert c.moe is not None
    assert local.moe is not None
    # the meta device supports grouped products in bf16 only
    experts, rows = block.moe.experts.to(torch.bfloat16), TOKENS * c.moe.top_k
    here = torch.empty(rows, c.dim, dtype=torch.bfloat16, requires_grad=True)
    ends, expert = torch.empty(c.moe.experts // ranks, dtype=torch.int32), torch.empty(rows, dtype=torch.int64)
    inside = [element / 2 * n for n in _run(experts, lambda: experts(here.clone(), ends, expert))]
    # the experts' outputs before they are weighted, the router's probabilities, indices
    around = rows * c.dim * element + 4 * TOKENS * c.moe.experts + 4 * 8 * rows
    moe = block.moe
    if c.moe.scores == "sigmoid":  # the copies in fp32 of what the router reads, but for that of its weight
        router = _run(moe, lambda: moe._sigmoid_choice(x.clone().flatten(0, 1)))[0]
        around += TOKENS * router - 4 * moe.router.weight.numel() * (element < 4)
    shared = (0.0, 0.0) if moe.shared is None else _run(moe, lambda: moe._shared(x.clone()))
    everything = inside[0] + around / TOKENS + c.dim * element + shared[0]
    # forward: the outputs with their share; with a bias, the products and the biases of their rows. Backward: the
    # gradients of each row's output with its share, without, and of its share before they are summed.
    outputs, of_shared = c.moe.top_k * c.dim * element, 2 * local.moe.shared_intermediate_size * element
    return everything, inside[1] + shared[1], (2 if c.moe.bias else 1) * outputs, max(3 * outputs, of_shared)
