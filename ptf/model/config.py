"""What a decoder is made of: architecture only, no Hugging Face, no training. Families map config.json onto it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of the gated MLP
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool  # the head is the embedding
    qk_norm: bool
    init_std: float = 0.02
