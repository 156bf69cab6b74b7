"""Mixture of experts: a router sends each token to a few gated MLPs, which run as one grouped matrix product over the
tokens sorted by expert.

Sorting gives each token `top_k` rows. It is undone by the inverse permutation, so both directions
are gathers, forward and backward: no atomic additions, whose order a GPU chooses, and no host sync for the number of
tokens of an expert.

The load-balancing loss (Fedus et al., Switch Transformers, 2021, eq. 4-6) is E · Σ over the E experts of f · P, where f
is the number of times that the expert was chosen per token and P is its mean router probability. It is `top_k` if the
load is even. Padding does not count. Where experts are scored by a sigmoid, P is the mean of the scores divided by
their sum (DeepSeek-V3, 2024, eq. 17-20, but over the batch); transformers has no loss for these models, so its weight
is 0 unless a config.json gives one.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ptf.model.config import DecoderConfig, MoE
from ptf.model.layers import MLP, LayerFactory
from ptf.model.lora import Linear, attach, grouped
from ptf.model.quantised_weights import QuantisedWeight, grouped_linear

# on a CPU, a matrix product rounds each row the same way for any number of rows that is a multiple of this
ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Routing:
    """Statistics of one layer's router over the real tokens of a batch."""

    chosen: Tensor  # [experts] how often each expert was chosen
    probability: Tensor  # [experts] sum over tokens of the router's probabilities; has a gradient
    tokens: Tensor  # number of real tokens


@dataclass(frozen=True, slots=True)
class TokensByExpert:
    """Tokens sorted by expert: one row for each token and each of its experts."""

    order: Tensor  # [n·k] the row's place in the unsorted [n, k]
    token: Tensor  # [n·k] the row's token
    expert: Tensor  # [n·k] the row's expert
    ends: Tensor  # [experts] the end of each expert's rows, int32
    inverse: Tensor  # [n·k] for each place in the unsorted [n, k], its row
    places: Tensor  # [n, k] each token's rows, in the order of their experts

    @staticmethod
    def of(chosen: Tensor, experts: int) -> "TokensByExpert":
        """Sort the choices [n, k] of n tokens by expert."""
        order = chosen.flatten().argsort(stable=True)
        expert, here = chosen.flatten().index_select(0, order), torch.arange(len(order), device=order.device)
        inverse = torch.empty_like(order).scatter(0, order, here)
        # counting with `bincount` would wait for a GPU
        every = torch.arange(experts, device=expert.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, every, right=True, out_int32=True)
        return TokensByExpert(
            order, order // chosen.shape[1], expert, ends, inverse, inverse.view_as(chosen).sort(-1).values
        )


def _added(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sums of the rows [m, ..] at the places [n, k] of each token: [n, ..]."""
    return rows.index_select(0, places.flatten()).view(*places.shape, *rows.shape[1:]).sum(1)


class _Moved(Function):
    """Copies of each token's values at its places, [n, ..] → [m, ..]; with `back`, the sum of the rows of each token,
    [m, ..] → [n, ..]. Each is the transpose of the other.

    `token` [m] is the token of each row, and `places` [n, k] are the rows of each token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, places: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(token if back else places)
        ctx.back = back
        return _added(x, places) if back else x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index) if ctx.back else _added(grads[0], index), None, None, None


class _BiasOfRows(Function):
    """The bias of each row's expert, [experts, out] → [n, out]. The gradient sums the rows of each expert, as a grouped
    product with ones."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return bias.index_select(0, expert)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        # grouped products need rows of a multiple of 16 bytes: one column of ones would do
        return F.grouped_mm(grad.new_ones(len(grad), 16 // grad.element_size()).t(), grad, offs=ends)[:, 0], None, None


def wide_projection(module: Linear, x: Tensor) -> Tensor:
    """Return a projection, with its adapter's part, in fp32 where the model computes in less."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(wide), module.weight.to(wide), None if module.bias is None else module.bias.to(wide))
    if module.adapters and module.adapted:
        low = F.linear(x.to(wide), module.lora_a.to(wide))
        y = y + module.adapters["weight"].scale * F.linear(low, module.lora_b.to(wide))
    return y


class Experts(nn.Module):
    """The projections of all experts, stacked: [experts, out, in]."""

    def __init__(self, dim: int, c: MoE, factory: LayerFactory, path: str) -> None:
        super().__init__()
        kernels = factory.kernels
        self.gate = partial(kernels.gate, F.silu) if c.clamp is None else partial(kernels.clamped_gate, c.clamp)
        shapes = {
            "gate": (c.intermediate_size, dim),
            "up": (c.intermediate_size, dim),
            "down": (dim, c.intermediate_size),
        }
        for name, (out, into) in shapes.items():
            self.register_parameter(f"{name}_proj", Parameter(torch.zeros(c.experts, out, into)))
            self.register_parameter(f"{name}_bias", Parameter(torch.zeros(c.experts, out)) if c.bias else None)
        lora = factory.lora
        self.quantised: dict[str, QuantisedWeight] = {}
        self.adapters = {
            p: attach(self, p, lora) for p in (f"{name}_proj" for name in shapes) if lora and lora.adapts(f"{path}.{p}")
        }
        self.adapted = True  # False inside `adapters_off`
        for p in (f"{name}_proj" for name in shapes):
            factory.quantise_weight(self, p, f"{path}.{p}")

    def forward(self, x: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
        """Return the experts' outputs for tokens sorted by expert.

        `x` is [n, dim]; `expert` [n] is the expert of each row; `ends` [experts] is the end of each expert's rows. Rows
        after the last end have no expert; what is returned for them, and their gradient, is undefined.
        """
        place, rows = None, len(x)
        if x.device.type == "cpu":
            x, ends, expert, place = _filled_up(x, ends, expert)

        def project(name: str, h: Tensor) -> Tensor:
            bias = getattr(self, f"{name}_bias")
            y = grouped_linear(self, f"{name}_proj", h, ends)
            adapter = self.adapters.get(f"{name}_proj")
            if adapter is not None and self.adapted:
                y = y + grouped(self, adapter, h, ends)
            return y if bias is None else y + _BiasOfRows.apply(bias, expert, ends)

        y = project("down", self.gate(project("gate", x), project("up", x)))
        if place is None:
            return y
        y = y.index_select(0, place)
        return y if len(y) == rows else F.pad(y, (0, 0, 0, rows - len(y)))


def _filled_up(x: Tensor, ends: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pad the rows of each expert to a multiple of `ROW_MULTIPLE`, and drop those that have none.

    Return the padded rows, `ends` and `expert` for them, and the indices of the real rows.

    A matrix product on a CPU rounds a row differently depending on the number of rows (MKL: by up to 1e-5 at width 96;
    not at all for multiples of 8). Without the padding, the routing of one document would change the last bits of
    another document's results.
    """
    x, expert = x[: int(ends[-1])], expert[: int(ends[-1])]
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    filled = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
    later = filled.cumsum(0) - filled - (ends - counts)  # by how many rows each expert's rows move back
    place = torch.arange(len(x)) + later[expert]
    rows = int(filled.sum())
    return (
        x.new_zeros(rows, x.shape[1]).index_copy(0, place, x),
        filled.cumsum(0).to(torch.int32),
        torch.repeat_interleave(filled, output_size=rows),
        place,
    )


class MixtureOfExperts(nn.Module):
    """A router and its experts, and beside them an MLP that every token passes, if the config has one."""

    def __init__(self, c: DecoderConfig, factory: LayerFactory, path: str) -> None:
        super().__init__()
        assert c.moe is not None
        self.config = c.moe
        self.router = factory.linear(f"{path}.router", c.dim, c.moe.experts, c.moe.bias)
        # fp32, as bits: whatever casts the weights leaves integers alone, and nothing trains them
        self.correction_bias = (
            Parameter(torch.zeros(c.moe.experts, dtype=torch.int32), requires_grad=False) if c.moe.correction else None
        )
        self.experts = factory.component(f"{path}.experts", Experts, c.dim, c.moe, factory, f"{path}.experts")
        width = c.moe.shared_intermediate_size
        self.shared = MLP(replace(c, intermediate_size=width), factory, f"{path}.shared") if width else None
        self.shared_gate = factory.linear(f"{path}.shared_gate", c.dim, 1) if c.moe.shared_gate else None
        self.first = 0  # the expert that the rows begin with: under tensor parallelism this rank's first
        self.routing: Routing | None = None  # statistics of the last forward pass

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return the output for x [B, T, D]; `real` [B, T] is False at padding."""
        c, shape = self.config, x.shape
        x = x.flatten(0, 1)
        probability, share, chosen = self._sigmoid_choice(x) if c.scores == "sigmoid" else self._softmax_choice(x)
        self.routing = self._routing(probability, chosen, real.flatten())
        by_expert = TokensByExpert.of((chosen - self.first) % c.experts, c.experts)
        shares = _Moved.apply(share.to(x.dtype).flatten(), by_expert.order, by_expert.inverse[:, None], False)
        spread = _Moved.apply(x, by_expert.token, by_expert.places, False)
        y = self.experts(spread, by_expert.ends, by_expert.expert) * shares[:, None]
        y = _Moved.apply(y, by_expert.token, by_expert.places, True)
        return (y if self.shared is None else y + self._shared(x)).view(shape)

    def _softmax_choice(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities [n, experts] for x [n, dim], and the weights and the numbers of the chosen experts,
        [n, k] each."""
        c, logits = self.config, self.router(x)  # [n, experts]
        probability = logits.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        if c.clamp is None:
            share, chosen = probability.topk(c.top_k, dim=-1)  # [n, k]
            if c.normalise:
                share = share / share.sum(-1, keepdim=True)
        else:
            best, chosen = logits.topk(c.top_k, dim=-1)
            share = best.softmax(-1)
        return probability, share * c.scaling if c.scaling != 1.0 else share, chosen

    def _sigmoid_choice(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same where each expert has a score for itself (DeepSeek-V3, 2024, eq. 12-16), in fp32."""
        c, scores = self.config, wide_projection(self.router, x).sigmoid()  # [n, experts]
        preferred = scores.detach()
        if self.correction_bias is not None:
            preferred = preferred + self.correction_bias.view(torch.float32)
        if c.groups > 1:
            grouped = preferred.unflatten(-1, (c.groups, -1))  # [n, groups, experts of a group]
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(c.top_groups, dim=-1).indices
            left = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            preferred = grouped.masked_fill(left[..., None], float("-inf")).flatten(-2)
        chosen = preferred.topk(c.top_k, dim=-1).indices  # [n, k]
        share = scores.gather(-1, chosen)
        if c.normalise:
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return scores / scores.sum(-1, keepdim=True), share * c.scaling, chosen

    def _shared(self, x: Tensor) -> Tensor:
        """Return the output [n, dim] of the MLP that every token passes."""
        assert self.shared is not None
        y = self.shared(x)
        return y if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * y

    def _routing(self, probability: Tensor, chosen: Tensor, real: Tensor) -> Routing:
        weight = real.to(probability.dtype)
        picked = torch.zeros_like(probability).scatter(-1, chosen, 1.0)  # [B·T, experts] 1 where chosen
        return Routing(weight @ picked, weight @ probability, weight.sum())


def load_balancing_loss(routings: list[Routing]) -> Tensor:
    """Return the load-balancing loss over all layers together, as in Hugging Face; `top_k` for an even load."""
    tokens = torch.stack([r.tokens for r in routings]).sum().clamp(min=1)
    chosen = torch.stack([r.chosen for r in routings]).sum(0)
    return len(chosen) * (chosen / tokens * torch.stack([r.probability for r in routings]).sum(0) / tokens).sum()
