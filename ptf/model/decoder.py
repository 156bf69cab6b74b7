"""The forward pass of every family on one screen, written for one device; sharding comes from outside (plan.py)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ptf.model.attention import Attend, Attention, backend
from ptf.model.config import DecoderConfig
from ptf.model.head import Head
from ptf.model.layers import MLP, Parts, RMSNorm
from ptf.model.moe import MixtureOfExperts, balance
from ptf.model.rope import Table, rotary
from ptf.model.scalar import Scalar

Output = Head | Scalar | nn.Module  # a module: the head that the config declares (declared.py)
Reduce = Callable[[Tensor, Any], Any]  # (hidden [B, T, D], Output) → what the loss needs


class Block(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int, parts: Parts, path: str) -> None:
        super().__init__()
        norm = lambda: RMSNorm(c.dim, c.norm_eps, c.norm_offset)  # noqa: E731
        self.attn_norm = norm()
        self.attn = parts.component(f"{path}.attn", Attention, c, layer, parts, f"{path}.attn")
        self.attn_post_norm = norm() if c.sandwich else nn.Identity()
        self.mlp_norm = norm()
        moe = c.kinds[layer].moe
        self.mlp = None if moe else parts.component(f"{path}.mlp", MLP, c, parts, f"{path}.mlp")
        self.moe = parts.component(f"{path}.moe", MixtureOfExperts, c, parts, f"{path}.moe") if moe else None
        self.mlp_post_norm = norm() if c.sandwich else nn.Identity()

    def forward(self, x: Tensor, rope: Table, attend: Attend, real: Tensor) -> Tensor:
        x = x + self.attn_post_norm(self.attn(self.attn_norm(x), rope, attend))
        h = self.mlp_norm(x)
        h = self.mlp(h) if self.moe is None else self.moe(h, real)  # type: ignore[misc]
        return x + self.mlp_post_norm(h)


def projection(c: DecoderConfig, parts: Parts, path: str) -> nn.Linear:
    """The output projection: to logits, or to one value."""
    return parts.linear(path, c.dim, 1 if c.head == "scalar" else c.padded)


class Decoder(nn.Module):
    """Tokens to whatever `reduce(hidden, head)` makes of them. The head is used inside forward, because sharded parameters are whole
    only there (FSDP2, tied embeddings)."""

    def __init__(self, config: DecoderConfig, parts: Parts | None = None) -> None:
        super().__init__()
        self.parts = parts = parts or Parts()
        if parts.pattern("head"):
            config = replace(config, head="declared")
        self.config = c = replace(config, tied=config.tied and config.head == "lm")
        self.embed = nn.Embedding(c.padded, c.dim)
        self.layers = nn.ModuleList(Block(c, i, parts, f"layers.{i}") for i in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps, c.norm_offset)
        self.head = parts.component("head", projection, c, parts, "head")
        if c.tied:
            self.head.weight = self.embed.weight
        self.first, self.group = 0, cast("ProcessGroup | None", None)  # the vocabulary's row that the head's begin with here, and who has the others (plan.py)

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor, reduce: Reduce, attend: Attend | None = None) -> Any:
        """All [B, T]. `attend` defaults to causal attention inside each document of `segments`."""
        c = self.config
        attend = attend or backend(tokens.device)(segments, positions)
        tables = {rope: rotary(positions, c.head_dim, rope) for rope in {kind.rope for kind in c.kinds}}
        real = segments >= 0
        x = self.embed(tokens)  # [B, T, D]
        if c.embed_scale != 1.0:
            x = x * torch.tensor(c.embed_scale, dtype=x.dtype)  # rounded to the model's type, as Gemma was trained
        for layer, kind in zip(self.layers, c.kinds, strict=True):
            x = layer(x, tables[kind.rope], attend, real)
        return reduce(self.norm(x), self.output())

    @property
    def shares_beginnings(self) -> bool:
        """Whether a document may go on from another's beginning: where nothing mixes tokens but our attention."""
        return all(path == "head" for path in self.parts.own)

    def output(self) -> Output:
        """What `reduce` is given; to be used inside forward."""
        c = self.config
        if c.head == "declared":
            return self.head
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        return Scalar(weight) if c.head == "scalar" else Head(weight, c.vocab, c.softcap, first=self.first, group=self.group)

    def balance(self) -> Tensor | None:
        """The load-balancing loss of the last forward pass (a mean, with gradient); None without experts."""
        routings = [r for layer in self.layers if (r := getattr(layer.moe, "routing", None)) is not None]  # one of the user's own may have none
        return balance(routings) if routings else None  # type: ignore[arg-type]
