"""Floating-point operations (FLOPs) of a step, counted from the modules that do them. MFU is these FLOPs per second,
divided by the peak of the hardware.

A matrix costs 2 · its size for each token forward, as much again for the gradient of its input and as much for its own
gradient. A gradient that is not needed is not counted: a frozen weight has none, and nothing before the first adapter
may need one. Attention costs what its documents need (causal pairs inside the window, not the square of the sequence),
experts what `top_k` of them do, and the head counts trained positions only. What is computed twice (activation
checkpointing) counts once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from ptf.model.attention import Attention, LatentAttention
from ptf.model.decoder import Block, Decoder
from ptf.model.gated_delta import GatedDeltaNet
from ptf.model.layers import MLP
from ptf.model.model import Model
from ptf.model.moe import Experts, MixtureOfExperts


@dataclass(frozen=True, slots=True)
class Flops:
    """The operations of a forward and a backward pass."""

    per_token: float  # all projections but the head
    # window → cost of a (query, key) pair, in all layers of that window
    per_pair: Mapping[int | None, float]
    per_target: float  # the head, for each trained position

    @staticmethod
    def of(model: Model) -> "Flops":
        """Count the operations of a model.

        For a model behind Decoder's interface whose layers are not known, they are counted as if everything in them
        were trained or frozen together.
        """
        if not isinstance(model, Decoder):
            return _of_unknown_layers(model)
        body, head = _Tally(), _Tally()
        upstream = _trains(model.embed)
        for block in cast("Sequence[Block]", model.layers):
            upstream |= body.part(block.attn, upstream or _trains(block.attn_norm)) or _trains(block.attn_post_norm)
            part = cast("nn.Module", block.mlp if block.moe is None else block.moe)
            upstream |= body.part(part, upstream or _trains(block.mlp_norm)) or _trains(block.mlp_post_norm)
        head.chain(model.head, upstream or _trains(model.norm))
        return Flops(body.tokens, body.pairs, head.tokens)

    def step(self, lengths: Sequence[int], targets: float, prefix_lengths: Sequence[int] | None = None) -> float:
        """Return the operations over packed documents of these lengths with `targets` trained positions.

        `prefix_lengths` (default 0) are the tokens before each document that were computed with another document, whose
        prefix it shares.
        """
        documents = list(zip(lengths, [0] * len(lengths) if prefix_lengths is None else prefix_lengths, strict=True))
        attention = sum(
            each * (pairs(b + n, window) - pairs(b, window))
            for window, each in self.per_pair.items()
            for n, b in documents
        )
        return self.per_token * sum(lengths) + attention + self.per_target * targets


def pairs(length: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of a document under causal attention to the last `window` keys, its
    own included."""
    w = length if window is None else min(window, length)
    return w * (w + 1) // 2 + (length - w) * w


@dataclass(slots=True)
class _Tally:
    """Adds up operations.

    Everywhere `upstream` is whether the input needs a gradient, and the returned value is whether the output does.
    """

    tokens: float = 0.0
    pairs: dict[int | None, float] = field(default_factory=dict)

    def part(self, m: nn.Module, upstream: bool) -> bool:
        """Count an attention, an MLP or a mixture; of another kind, its projections one after the other."""
        if isinstance(m, MLP):
            inside = [self.chain(p, upstream) for p in (m.gate_proj, m.up_proj)]
            return self.chain(m.down_proj, any(inside))
        counted: dict[type[nn.Module], Callable[..., bool]] = {
            Attention: self.attention,
            GatedDeltaNet: self.linear_attention,
            LatentAttention: self.latent_attention,
            MixtureOfExperts: self.mixture,
        }
        count = next((count for kind, count in counted.items() if isinstance(m, kind)), self.chain)
        return count(m, upstream)

    def attention(self, m: Attention, upstream: bool) -> bool:
        """Count the projections of an attention, and what a (query, key) pair costs."""
        q, k, v = (self.chain(p, upstream) for p in (m.q_proj, m.k_proj, m.v_proj))
        q = q or _trains(m.q_norm) or _trains(m.q_width_norm)
        k = k or _trains(m.k_norm) or _trains(m.k_width_norm)
        scores = q or k or (m.sinks is not None and m.sinks.requires_grad)
        width = m.o_proj.in_features if isinstance(m.o_proj, nn.Linear) else 0
        # forward QK, backward dQ and dK; forward PV, backward dP and dV
        self.pairs[m.window] = self.pairs.get(m.window, 0.0) + 2 * (width * (1 + q + k) + width * (1 + scores + v))
        return self.chain(m.o_proj, scores or v)

    def linear_attention(self, m: GatedDeltaNet, upstream: bool) -> bool:
        """Count the projections of linear attention, and the three products of its rule with the state: what is read
        for the change, the change, and what is read for the output. Elementwise operations are not counted."""
        inside = [self.chain(p, upstream) for name, p in m.named_children() if name != "out_proj"]
        changed = any(inside) or m.a_log.requires_grad or m.dt_bias.requires_grad
        c = m.config
        self.tokens += 3 * 2 * c.value_heads * c.key_dim * c.value_dim * (1 + 2 * changed)
        return self.chain(cast("nn.Module", m.out_proj), changed)

    def latent_attention(self, m: LatentAttention, upstream: bool) -> bool:
        """Count the projections of a latent attention, and what a (query, key) pair costs."""
        q = upstream
        for part in m.to_queries:
            q = self.chain(m.get_submodule(part), q)
        narrow = self.chain(m.kv_a_proj, upstream)
        v = self.chain(m.kv_b_proj, self.chain(m.kv_a_norm, narrow))
        k = v or narrow
        values = m.o_proj.in_features
        keys = values // m.value_dim * m.head_dim
        self.pairs[m.window] = self.pairs.get(m.window, 0.0) + 2 * (keys * (1 + q + k) + values * (1 + (q or k) + v))
        return self.chain(m.o_proj, q or v)

    def mixture(self, m: MixtureOfExperts, upstream: bool) -> bool:
        """Count a router, the experts that a token goes to, and what every token passes."""
        routed = self.chain(m.router, upstream)
        for shared in (m.shared, m.shared_gate):
            routed |= shared is not None and self.part(shared, upstream)
        if not isinstance(m.experts, Experts):
            return self.chain(m.experts, upstream) | routed
        share = m.config.top_k / m.config.experts
        inside = [self.matrix(m.experts, f"{p}_proj", upstream, share, f"{p}_bias") for p in ("gate", "up")]
        return self.matrix(m.experts, "down_proj", any(inside), share, "down_bias") | routed

    def chain(self, module: nn.Module, upstream: bool) -> bool:
        """Count projections as if they came one after the other.

        That is exact for one, and an upper bound for a component whose inside is not known.
        """
        for m in module.modules():
            if isinstance(m, nn.Linear):
                upstream = self.matrix(m, "weight", upstream)
            else:
                upstream |= any(p.requires_grad for p in m.parameters(recurse=False))
        return upstream

    def matrix(self, module: nn.Module, name: str, upstream: bool, share: float = 1.0, bias_name: str = "bias") -> bool:
        """Count a weight with its adapter, of which each token uses this share. Its bias costs nothing."""
        bias = module._parameters.get(bias_name)
        weight, quantised = module._parameters.get(name), getattr(module, "quantised", {})
        trains = weight is not None and weight.requires_grad
        size = quantised[name].shape.numel() if weight is None else weight.numel()
        self.tokens += 2 * share * size * (1 + upstream + trains)
        needs = upstream or trains or (bias is not None and bias.requires_grad)
        if (adapter := getattr(module, "adapters", {}).get(name)) is not None:
            a, b = (cast("nn.Parameter", module._parameters[n]) for n in (adapter.a, adapter.b))
            low = upstream or a.requires_grad
            self.tokens += (
                2 * share * (a.numel() * (1 + upstream + a.requires_grad) + b.numel() * (1 + low + b.requires_grad))
            )
            needs |= low or b.requires_grad
        return needs


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _of_unknown_layers(model: Model) -> Flops:
    """Count a model whose layers are not known: every linear layer, and attention over all pairs."""
    c, trains, body, head = model.config, _trains(model), _Tally(), _Tally()
    of_head = {id(m) for m in model.head.modules()}
    for m in model.modules():
        if isinstance(m, nn.Linear) and id(m) not in of_head:
            body.matrix(m, "weight", trains)
    head.chain(model.head, trains)
    of_pairs: dict[int | None, float] = {
        None: 2 * len(c.layers) * c.heads * (c.head_dim + c.value_dim) * (3 if trains else 1)
    }
    return Flops(body.tokens, of_pairs, head.tokens)
