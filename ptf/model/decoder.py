"""The forward pass of every family on one screen, written for one device; sharding comes from outside (plan.py)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ptf.model.attention import Attend, Attention, backend
from ptf.model.config import DecoderConfig
from ptf.model.layers import MLP, RMSNorm, linear
from ptf.model.rope import rotary

Reduce = Callable[[Tensor, Tensor], Any]  # (hidden [B, T, D], head weight [V, D]) → what the loss needs


class Block(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(c.dim, c.norm_eps)
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rope, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens to whatever `reduce(hidden, head)` makes of them. The head is used inside forward, because sharded parameters are whole
    only there (FSDP2, tied embeddings)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.head = linear(c.dim, c.vocab)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor, reduce: Reduce, attend: Attend | None = None) -> Any:
        """All [B, T]. `attend` defaults to causal attention inside each document of `segments`."""
        attend = attend or backend(tokens.device)(segments)
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed(tokens)  # [B, T, D]
        for layer in self.layers:
            x = layer(x, rope, attend)
        return reduce(self.norm(x), self.head.weight)
