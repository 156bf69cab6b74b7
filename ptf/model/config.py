"""The architecture of a decoder: no Hugging Face, no training. Families map a config.json onto it.

What differs between families, or between the layers of one, is a field here and never a subclass.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
PADDED_TO = 64  # the embedding and the head are padded to a multiple of so many rows: one tile of a GEMM


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary frequencies: the base, and how they are stretched beyond the length of pre-training (rope.py)."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int = 0  # llama3, yarn: the length of pre-training
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    scale: float = 1.0  # factor of cosines and sines (yarn's attention factor)
    partial: float = 1.0  # the share of a head's dimensions that is rotated: the first ones; 0: no positions (NoPE)
    # Ministral 3: queries are multiplied by 1 + query_growth · ln(1 + ⌊position / original_positions⌋)
    query_growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from one layer to the next."""

    rope: Rope
    window: int | None = None  # how many keys a query attends to, its own included; None: all before it
    moe: bool = False
    delta: bool = False  # linear attention by the gated delta rule, instead of softmax attention


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture of experts in place of the MLP: each token goes to `top_k` of `experts`."""

    experts: int
    top_k: int
    intermediate_size: int  # width of one expert
    normalise: bool = True  # the weights of the chosen experts sum to 1
    bias: bool = False  # the router and the experts have biases
    # GPT-OSS: gate and up are clamped here, and experts compute (up + 1) · gate · sigmoid(1.702 gate)
    clamp: float | None = None
    router_aux_loss_coef: float = 0.0  # weight of the load-balancing loss
    shared_intermediate_size: int = 0  # width of an MLP beside the experts, which every token passes; 0: none
    shared_gate: bool = False  # its output is scaled by the sigmoid of a projection of the token to one value
    # each expert is scored for itself, and the scores are shares without a softmax (DeepSeek-V3)
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False  # a bias of the scores, for the choice only, that gradients do not train
    groups: int = 1  # experts are chosen from the `top_groups` groups whose two best scores sum to most
    top_groups: int = 1
    scaling: float = 1.0  # factor of the weights of the chosen experts


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, and keys with values, are made of narrow projections of the token."""

    query_rank: int | None  # None: queries are projected directly
    key_rank: int  # of keys and values together
    rotated: int  # dimensions of a key and a query that are rotated, after the others; a key's are those of all heads
    value_dim: int
    interleaved: bool = True  # the rotated dimensions lie in pairs, and not in halves
    norm_eps: float = 1e-6  # of the norms of the narrow projections


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The sizes of linear attention (gated_delta.py)."""

    key_heads: int  # heads of queries and keys
    value_heads: int  # a multiple of them
    key_dim: int  # width of a head of queries or keys
    value_dim: int
    conv: int  # tokens that the convolution reads, the present one included
    fused: bool = False  # two projections, whose rows are grouped by key head, instead of four


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture of one decoder."""

    vocab: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    intermediate_size: int  # width of the gated MLP
    norm_eps: float
    max_positions: int
    tied: bool  # the head shares the embedding's weight
    layers: tuple[Layer, ...]
    qk_norm: bool = False  # the queries and the keys of each head are normalised
    qk_width_norm: bool = False  # the queries of all heads are normalised together, and the keys (OLMo 2)
    attention_gate: bool = False  # attention's output times sigmoid of a gate, which the query projection makes too
    delta: GatedDelta | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    latent: Latent | None = None
    sinks: bool = False  # a learned logit per head that takes attention away from every key
    attention_scale: float | None = None  # factor of query-key products; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become softcap · tanh(scores / softcap) (Gemma 2)
    activation: Activation = "silu"
    pre_norm: bool = True  # a norm before attention and before the MLP
    post_norm: bool = False  # a norm after attention and after the MLP
    norm_offset: bool = False  # norms scale by 1 + weight
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual stream (Granite)
    logit_scale: float = 1.0  # factor of the logits, before soft-capping (Granite)
    softcap: float | None = None  # logits become softcap · tanh(logits / softcap)
    moe: MoE | None = None
    init_std: float = 0.02
    head: Literal["lm", "scalar", "custom"] = "lm"  # logits, one value a position, or a module of the user's own

    @property
    def padded(self) -> int:
        """Rows of the embedding and of the head: the vocabulary, padded with rows that are zero and stay zero."""
        return -(-self.vocab // PADDED_TO) * PADDED_TO

    def beyond(self, tokens: int) -> str:
        """Return a clause about a context of that many tokens if the model was not made for it, else an empty text."""
        if tokens <= self.max_positions:
            return ""
        return (
            f"{tokens:,} tokens goes beyond the {self.max_positions:,} positions that the model was made for "
            "(max_position_embeddings in its config.json); lower data.seq_len to that, or give another model"
        )

    @property
    def attention_layers(self) -> int:
        """The number of layers with softmax attention, which keep keys and values of every token."""
        return sum(not layer.delta for layer in self.layers)

    @property
    def cache_elements(self) -> int:
        """The number of elements of the keys and values that a token has in all layers with softmax attention."""
        return self.attention_layers * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def value_dim(self) -> int:
        """The dimensions of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that the rotary tables are for."""
        return self.latent.rotated if self.latent else self.head_dim
