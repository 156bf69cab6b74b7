"""The cache of responses that are being generated: keys and values, and what linear attention keeps.

A context that several responses share is stored, and read, once. Contexts have keys and values of their
own, a response only those of its new tokens, and one softmax is over both (Athiwaratkun et al. 2024, bifurcated
attention).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ptf.model.attention import Attention
from ptf.model.config import DecoderConfig
from ptf.model.gated_delta import GatedDeltaNet
from ptf.model.kernels.attention import Attend, PackedDelta, inside_documents, soft_capped
from ptf.model.kernels.delta_rule import step, windows


@dataclass(frozen=True, slots=True)
class CachedAttend:
    """An `Attend` over caches."""

    attention: Callable[[Attention, Tensor, Tensor, Tensor], Tensor]
    delta: Callable[[GatedDeltaNet, Tensor, Tensor, Tensor], Tensor]

    def __call__(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See Attend."""
        return self.attention(layer, q, k, v)


class KeyValues:
    """Keys and values of `rows` rows of at most `length` tokens, and what linear attention keeps of each row."""

    def __init__(self, c: DecoderConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        with_keys = [i for i, kind in enumerate(c.layers) if not kind.delta]
        self.place = {layer: place for place, layer in enumerate(with_keys)}
        # keys; values: [layers with softmax attention, rows, kv_heads, length, D]
        self.stored = [
            torch.zeros(len(self.place), rows, c.kv_heads, length, size, device=device, dtype=dtype)
            for size in (c.head_dim, c.value_dim)
        ]
        self.delta = DeltaCache()

    def prefill(self, segments: Tensor, positions: Tensor, slots: Tensor | None = None) -> CachedAttend:
        """Attend inside each context, and store what is kept of context i in row `slots[i]`, by default row i."""
        inside = inside_documents(segments, positions)
        real = segments.reshape(-1) >= 0
        row, at = segments.reshape(-1)[real], positions.reshape(-1)[real]
        row = row if slots is None else slots[row]

        def attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for kept, values in zip(self.stored, (k, v), strict=True):
                kept[self.place[layer.layer]][row, :, at] = values.flatten(0, 1)[real].to(kept.dtype)
            return inside(layer, q, k, v)

        @functools.cache
        def packed() -> tuple[PackedDelta, Tensor]:
            contexts = segments[segments >= 0].unique()
            return PackedDelta(segments, positions), contexts if slots is None else slots[contexts]

        def delta(layer: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
            rule, rows = packed()
            out, after = rule(layer, qkv, decay, beta)
            self.delta.put(layer, rows, windows(qkv, rule.chunks, layer.conv.weight.shape[-1]), after)
            return out

        return CachedAttend(attend, delta)


class Cache(KeyValues):
    """Keys and values of contexts with these lengths, and of `new` tokens of each response (`map_contexts`).

    What linear attention keeps is of contexts, then of responses.
    """

    def __init__(
        self, c: DecoderConfig, lengths: Sequence[int], new: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(c, len(lengths), max(lengths), device, dtype)
        self.lengths = torch.tensor(lengths, device=device)  # [contexts]
        # keys; values: [layers with softmax attention, responses, kv_heads, new, D]
        self.answers = [t.new_zeros(len(self.place), 0, c.kv_heads, new, t.shape[-1]) for t in self.stored]

    def map_contexts(self, which: Tensor) -> None:
        """Begin n responses to the contexts with these indices, [n]."""
        self.answers = [t.new_zeros(len(t), len(which), *t.shape[2:]) for t in self.answers]
        self.delta.select(which)
        self._arrange(which)

    def keep(self, rows: Tensor) -> None:
        """Continue with these responses only."""
        self.answers, self.slot = [t[:, rows] for t in self.answers], self.slot[rows]
        self.delta.select(rows)
        needed, self.owner = self.owner[rows].unique(return_inverse=True)
        self._of_contexts(needed)
        if len(self.lengths) * self.width > 2 * len(rows):
            self._arrange(self.owner)

    def branch(self, rows: Tensor) -> None:
        """Continue with these responses; one of them may be continued several times."""
        self.answers = [t[:, rows] for t in self.answers]
        self.delta.select(rows)
        self._arrange(self.owner[rows])

    def _arrange(self, which: Tensor) -> None:
        """Group the queries of `width` responses of one context.

        A context with more responses is copied, so that however the responses are distributed, at most three times as
        many queries are computed as there are responses.
        """
        n, contexts = len(which), len(self.lengths)
        self.width = -(-n // contexts)
        counts = which.bincount(minlength=contexts)
        order = which.argsort(stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(n, device=which.device) - (counts.cumsum(0) - counts)[which[order]]
        copies, self.owner = (which * n + rank // self.width).unique(return_inverse=True)
        self.slot = rank % self.width
        self._of_contexts(copies // n)

    def _of_contexts(self, needed: Tensor) -> None:
        if not torch.equal(needed, torch.arange(len(self.lengths), device=needed.device)):
            self.lengths = self.lengths[needed]
            longest = int(self.lengths.max())
            self.stored = [t[:, needed, :, :longest] for t in self.stored]
        self.index = self.owner * self.width + self.slot  # of each response, among `width` for each context

    def step(self, turn: int) -> Attend:
        """Attend from new token `turn` of every response to all tokens before it."""
        at = torch.arange(self.stored[0].shape[3], device=self.lengths.device)
        after = at >= self.lengths[:, None]  # [contexts, longest]
        ragged = bool(after.any())

        def attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = self.place[layer.layer]
            for kept, values in zip(self.answers, (k, v), strict=True):
                kept[place][:, :, turn] = values[:, 0]
            first, hidden = 0, after if ragged else None
            if layer.window is not None:
                first = max(0, turn + 1 - layer.window)
                hidden = after | (self.lengths[:, None] + turn - at >= layer.window)
            n, _, heads, size = q.shape
            # a cache of bf16 is computed with in fp32
            context = [t[place].float() for t in self.stored]
            answers = [t[place][:, :, first : turn + 1].float() for t in self.answers]
            kv_heads, new = answers[0].shape[1:3]
            query = (q[:, 0].float() * layer.scale).view(n, kv_heads, heads // kv_heads, size)
            before = soft_capped(self._together(query) @ context[0].mT, layer)
            if hidden is not None:
                before.masked_fill_(hidden[:, None, None], float("-inf"))
            scores = [self._apart(before), soft_capped(query @ answers[0].mT, layer)]
            if layer.sinks is not None:
                scores.append(layer.sinks.to(query.dtype).view(1, kv_heads, -1, 1).expand(n, -1, -1, -1))
            weights = torch.cat(scores, -1).softmax(-1)
            of_context, of_answer = weights.split([len(at), weights.shape[-1] - len(at)], -1)
            out = self._apart(self._together(of_context) @ context[1]) + of_answer[..., :new] @ answers[1]
            return out.reshape(n, 1, heads, -1).to(q.dtype)

        return CachedAttend(attend, self.delta.step)

    def _together(self, x: Tensor) -> Tensor:
        """Group the responses by context: [n, kv_heads, g, E] → [contexts, kv_heads, width·g, E].

        The places of responses that have ended are 0.
        """
        grouped = x.new_zeros(len(self.lengths) * self.width, *x.shape[1:]).index_copy_(0, self.index, x)
        return grouped.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)

    def _apart(self, x: Tensor) -> Tensor:
        """Return the inverse of `_together`."""
        return x.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1).index_select(0, self.index)


@dataclass(eq=False)
class DeltaCache:
    """What linear attention keeps: the last inputs of its convolution and the state of its rule.

    Convolution windows [rows, width − 1, channels] and states [rows, heads, key_dim, value_dim] of each layer.

    A row is a context or a response, as its owner numbers them.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def put(self, layer: GatedDeltaNet, rows: Tensor, windows: Tensor, states: Tensor) -> None:
        """Set the windows and states of these rows, [n]; make room for them where they are new."""
        held = self.layers.get(layer.layer, (windows[:0], states[:0]))
        self.layers[layer.layer] = held = _with_rows(held, int(rows.max()) + 1)
        for t, values in zip(held, (windows, states), strict=True):
            t[rows] = values

    def select(self, rows: Tensor) -> None:
        """Keep these rows only, in this order; a row may be kept several times."""
        self.layers = {layer: (windows[rows], states[rows]) for layer, (windows, states) in self.layers.items()}

    def copy(self, source: int, target: int) -> None:
        """Copy one row to another, which may be new."""
        self.layers = {layer: _with_rows(held, target + 1) for layer, held in self.layers.items()}
        for held in self.layers.values():
            for t in held:
                t[target] = t[source]

    def step(self, layer: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return the output for the next token of the first n rows, [n, 1, value_heads, value_dim], and go on.

        `qkv` is [n, 1, channels], `decay` and `beta` are [n, 1, value_heads].
        """
        windows, states = self.layers[layer.layer]
        n = len(qkv)
        inputs = torch.cat((windows[:n], qkv), 1)  # [n, width, channels]
        heads = layer.heads((inputs * layer.conv.weight[:, 0].t()).sum(1))
        out, states[:n] = step(states[:n], *heads, decay[:, 0], beta[:, 0])
        windows[:n] = inputs[:, 1:]
        return out[:, None]


def _with_rows(held: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return windows and states with at least so many rows; new ones are zero."""
    if (more := count - len(held[0])) <= 0:
        return held
    windows, states = (torch.cat((t, t.new_zeros(more, *t.shape[1:]))) for t in held)
    return windows, states
