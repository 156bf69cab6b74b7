"""The decoder: the forward pass of every family, written for one device. sharding.py distributes it from outside."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ptf.model.attention import Attention, LatentAttention
from ptf.model.config import DecoderConfig
from ptf.model.gated_delta import GatedDeltaNet
from ptf.model.head import Head, Scalar
from ptf.model.kernels.attention import Attend, inside_documents
from ptf.model.layers import MLP, LayerFactory, RMSNorm
from ptf.model.mapped_model import MappedModel
from ptf.model.moe import MixtureOfExperts, load_balancing_loss
from ptf.model.rope import Table, rotary
from ptf.varlen import Varlen

HeadFn = Callable[[Tensor, Any], Any]  # (hidden states [B, T, D], head) → what the loss needs


class Block(nn.Module):
    """One transformer layer: attention, then an MLP or a mixture of experts, each with a residual connection and a norm
    before it, after it, or both."""

    def __init__(self, c: DecoderConfig, layer: int, factory: LayerFactory, path: str) -> None:
        super().__init__()
        norm = partial(RMSNorm, c.dim, c.norm_eps, c.norm_offset, factory.kernels)
        self.residual_scale = c.residual_scale
        self.attn_norm = norm() if c.pre_norm else nn.Identity()
        kind = GatedDeltaNet if c.layers[layer].delta else LatentAttention if c.latent else Attention
        self.attn = factory.component(f"{path}.attn", kind, c, layer, factory, f"{path}.attn")
        self.attn_post_norm = norm() if c.post_norm else nn.Identity()
        self.mlp_norm = norm() if c.pre_norm else nn.Identity()
        moe = c.layers[layer].moe
        self.mlp = None if moe else factory.component(f"{path}.mlp", MLP, c, factory, f"{path}.mlp")
        self.moe = factory.component(f"{path}.moe", MixtureOfExperts, c, factory, f"{path}.moe") if moe else None
        self.mlp_post_norm = norm() if c.post_norm else nn.Identity()

    def forward(self, x: Tensor, rope: Table, attend: Attend, real: Tensor) -> Tensor:
        """Return the output of the layer [B, T, D].

        `rope` holds the rotary tables; `real` [B, T] is False at padding.
        """
        h = self.attn_post_norm(self.attn(self.attn_norm(x), rope, attend))
        x = torch.add(x, h, alpha=self.residual_scale)
        h = self.mlp_norm(x)
        h = self.moe(h, real) if self.moe is not None else cast("nn.Module", self.mlp)(h)
        return torch.add(x, self.mlp_post_norm(h), alpha=self.residual_scale)


def projection(c: DecoderConfig, factory: LayerFactory, path: str) -> nn.Linear:
    """Make the output projection: to the (padded) vocabulary, or to one value with a scalar head."""
    return factory.linear(path, c.dim, 1 if c.head == "scalar" else c.padded)


class Decoder(MappedModel):
    """A decoder-only transformer, whose forward pass returns what `head_fn(hidden, head)` computes.

    The head is used inside `forward`, because sharded parameters are gathered only there (FSDP2, tied embeddings).
    """

    supports_compilation = first_layers_stand_alone = True

    def __init__(self, config: DecoderConfig, factory: LayerFactory | None = None) -> None:
        super().__init__()
        self.factory = factory = factory or LayerFactory()
        if factory.pattern("head"):
            config = replace(config, head="custom")
        self.config = c = replace(config, tied=config.tied and config.head == "lm")
        self.kernels, flash = factory.kernels, factory.kernels.flash
        # makes the attention of a batch from its segments, its positions and its `Varlen`
        self.attention = inside_documents if flash is None or flash.obstacle(c) else flash
        # `nn.Embedding` would draw its weights, for which torch imports its compiler on the meta device
        self.embed = nn.Embedding.from_pretrained(torch.empty(c.padded, c.dim), freeze=False)
        self.layers = nn.ModuleList(Block(c, i, factory, f"layers.{i}") for i in range(len(c.layers)))
        self.norm = RMSNorm(c.dim, c.norm_eps, c.norm_offset, factory.kernels)
        self.head = factory.component("head", projection, c, factory, "head")
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        head_fn: HeadFn,
        attend: Attend | None = None,
        varlen: Varlen | None = None,
    ) -> Any:
        """Run the model and return `head_fn(hidden states [B, T, D], head)`; all tensors are [B, T].

        `attend` defaults to causal attention inside each document of `segments`. `varlen` is the batch's; a fused
        attention (kernels/fused.py) that is not given it waits for the device.
        """
        c = self.config
        attend = attend or self.attention(segments, positions, varlen)
        tables = {rope: rotary(positions, c.rotary_dim, rope) for rope in {kind.rope for kind in c.layers}}
        real = segments >= 0
        x = self.embed(tokens)  # [B, T, D]
        # in the dtype that they are used in: FSDP would cast them for each layer, and recomputation keep every copy
        tables = {rope: (*(t.to(x.dtype) for t in table[:2]), *table[2:]) for rope, table in tables.items()}
        if c.embed_scale != 1.0:
            x = x * torch.tensor(
                c.embed_scale, dtype=x.dtype
            )  # rounded to the model's dtype, as when Gemma was trained
        for layer, kind in zip(self.layers, c.layers, strict=True):
            x = layer(x, tables[kind.rope], attend, real)
        x = self.norm(x)
        if c.head == "custom":  # a module of the user's own (docs/components.md)
            return head_fn(x, self.head)
        weight = cast("Tensor", self.head.weight)
        if c.head == "scalar":
            return head_fn(x, Scalar(weight))
        if c.logit_scale != 1.0:
            x = x * c.logit_scale
        first, group = self.vocab_start, self.group
        return head_fn(x, Head(weight, c.vocab, c.softcap, vocab_start=first, group=group, kernels=self.kernels))

    @override
    def attention_name(self, device: torch.device) -> str:
        flash, packages = self.kernels.flash, self.kernels.packages
        name = flash and f"flash_attn {packages[flash.package]}"
        if flash is None:
            softmax = "flex_attention" if device.type == "cuda" else "SDPA per document"
        elif reason := flash.obstacle(self.config):
            softmax = f"flex_attention (not {name}: {reason})"
        else:
            softmax = f"{name} (flex_attention for documents that share a prefix)"
        if self.config.delta is None:
            return softmax
        rule = f"fla {packages['fla']}" if "fla" in packages else "PyTorch"
        return f"{softmax}; linear attention in chunks, by {rule}"

    @property
    def supports_shared_prefixes(self) -> bool:  # type: ignore[override]
        """Whether documents may share a prefix: true where nothing but our softmax attention mixes tokens.

        Linear attention would need the state after the prefix. A component of the user's own could mix tokens in
        another way; a head cannot.
        """
        return not any(layer.delta for layer in self.config.layers) and all(
            path == "head" for path in self.factory.constructors
        )

    @property
    @override
    def text_tokens(self) -> Tensor:
        return torch.arange(self.config.vocab)

    @override
    def load_balancing_loss(self) -> Tensor | None:
        # a mixture of the user's own may record no routing
        found: list[Any] = [getattr(layer.moe, "routing", None) for layer in self.layers]
        routings = [routing for routing in found if routing is not None]
        return load_balancing_loss(routings) if routings else None
