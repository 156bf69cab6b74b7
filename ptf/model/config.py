"""What a decoder is made of: architecture only, no Hugging Face, no training. Families map config.json onto it.

The one idea: what differs between families, or between the layers of one, is a field here and never a subclass.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Output = Literal["lm", "scalar", "declared"]
ROWS = 64  # of the vocabulary in one tile of a GEMM: what the embedding and the head are filled up to


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies: the base, and how they are stretched beyond the length of pre-training (see rope.py for the kinds)."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: the length of pre-training
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn: whole dimensions as the ends of the ramp
    scale: float = 1.0  # of cosines and sines (yarn's attention factor)


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope
    window: int | None = None  # how many keys a query sees, its own included; None: all before it
    moe: bool = False


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture of experts in place of the MLP: each token goes to `top_k` of `experts`."""

    experts: int
    top_k: int
    hidden: int
    normalise: bool = True  # the weights of the chosen sum to 1
    bias: bool = False  # of the router and the experts
    clamp: float | None = None  # GPT-OSS: gate and up are clamped here, and experts compute (up + 1) · gate · sigmoid(1.702 gate)
    balance: float = 0.0  # weight of the load-balancing loss


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of the gated MLP
    norm_eps: float
    max_positions: int
    tied: bool  # the head is the embedding
    kinds: tuple[Layer, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False  # a learned logit per head that takes attention away from every key
    attention_scale: float | None = None  # of queries times keys; None: head_dim ** -0.5
    activation: Activation = "silu"
    sandwich: bool = False  # a norm after attention and after the MLP, too
    norm_offset: bool = False  # norms scale by 1 + weight
    embed_scale: float = 1.0
    softcap: float | None = None  # of the logits
    moe: MoE | None = None
    init_std: float = 0.02
    head: Output = "lm"  # logits, one value a position, or a module of the user's own

    @property
    def padded(self) -> int:
        """Rows of the embedding and of the head: the vocabulary, filled up with rows that are zero and stay zero."""
        return -(-self.vocab // ROWS) * ROWS

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def experts(self) -> int:
        return self.moe.experts if self.moe else 0
