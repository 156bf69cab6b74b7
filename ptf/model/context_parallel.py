"""Context parallelism by heads (Jacobs et al., DeepSpeed Ulysses, 2023): every rank of a group holds a part of each
sequence, and in attention a part of the heads.

With 4 ranks, 16 heads and sequences of 32k tokens, a rank computes projections, norms and MLPs of 8k tokens. Before
attention the ranks exchange what they have: then each has 4 heads of all 32k tokens. Afterwards they exchange back. So
what mixes tokens runs on whole sequences, as on one rank, with fewer heads: there is nothing of it here.

The last hidden states are gathered, and all ranks compute the same loss, each with its own rows of the vocabulary. The
gradient of a parameter on a rank is then a part, and FSDP, whose shards these ranks are, sums the parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from ptf.meshes import Meshes
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.gated_delta import GatedDeltaNet
from ptf.model.head import Head
from ptf.model.kernels.attention import Attend
from ptf.model.moe import Routing
from ptf.model.tensor_parallel import all_gather, exchange, own_slice, raise_if_indivisible, summed
from ptf.varlen import Varlen

KEY = "compute.mesh.context_parallel_size"


def _swapped(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send block i of x [ranks, ..] to rank i, and return the blocks that were received, by their senders."""
    x = x.contiguous()  # what is made like a tensor that is not would have its strides
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def to_heads(parts: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Turn tensors [B, t, heads, D] of this rank's tokens into [B, t · ranks, heads / ranks, D] of all tokens, in one
    exchange."""
    cut = [part.unflatten(2, (group.size(), -1)) for part in parts]  # [B, t, ranks, heads / ranks, D]
    blocks = torch.cat([part.flatten(3) for part in cut], -1).movedim(2, 0)  # [ranks, B, t, values]
    whole = exchange(blocks, group, _swapped, _swapped).transpose(0, 1).flatten(1, 2)
    shapes = [part.shape[3:] for part in cut]
    columns = whole.split([shape.numel() for shape in shapes], -1)
    return [of_part.unflatten(-1, shape) for of_part, shape in zip(columns, shapes, strict=True)]


class ContextAttend:
    """An `Attend` of this rank's tokens, by one of whole sequences."""

    def __init__(self, whole: Attend, group: ProcessGroup) -> None:
        self.whole, self.group = whole, group

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [B, t, heads, V]; the arguments are those of `Attend`, for t tokens."""
        return self.to_tokens(self.of_heads(layer, q, k, v))

    def of_heads(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output of this rank's heads [B, T, heads / ranks, V]."""
        copies = max(1, self.group.size() // k.shape[2])  # ranks that share a key-value head have one each
        k, v = (t if copies == 1 else t.repeat_interleave(copies, 2) for t in (k, v))
        sinks = None if layer.sinks is None else self._own(layer.sinks)
        cap = getattr(layer, "softcap", None)
        heads = SimpleNamespace(window=layer.window, scale=layer.scale, softcap=cap, sinks=sinks)
        return self.whole(heads, *to_heads((q, k, v), self.group))

    def to_tokens(self, x: Tensor) -> Tensor:
        """Turn [B, T, heads / ranks, D] of this rank's heads into [B, t, heads, D] of its tokens, in one exchange."""
        blocks = x.unflatten(1, (self.group.size(), -1)).transpose(0, 1)  # [ranks, B, t, heads / ranks, D]
        return exchange(blocks, self.group, _swapped, _swapped).movedim(0, 2).flatten(2, 3)

    def delta(self, layer: Any, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return the output of linear attention [B, t, value_heads, value_dim]; see `Attend`."""
        c, ranks = layer.config, self.group.size()
        number = (c.key_heads, c.key_heads, c.value_heads)
        widths = (c.key_heads * c.key_dim, c.key_heads * c.key_dim, c.value_heads * c.value_dim)
        channels = [t.unflatten(-1, (n, -1)) for t, n in zip(qkv.split(widths, -1), number, strict=True)]
        channels = to_heads(channels, self.group)
        decay, strength = to_heads((decay[..., None], beta[..., None].to(decay.dtype)), self.group)
        heads: Any = SimpleNamespace(
            config=replace(c, key_heads=c.key_heads // ranks, value_heads=c.value_heads // ranks),
            conv=SimpleNamespace(weight=torch.cat([self._own(rows) for rows in layer.conv.weight.split(widths)])),
            kernels=layer.kernels,
        )
        heads.heads = partial(GatedDeltaNet.heads, heads)
        own = torch.cat([t.flatten(2) for t in channels], -1)
        out = self.whole.delta(heads, own, decay.squeeze(-1), strength.squeeze(-1).to(beta.dtype))
        return self.to_tokens(out)

    def _own(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's heads, of rows by head."""
        return rows.chunk(self.group.size())[self.group.rank()]


def context_parallel(model: Decoder, meshes: Meshes) -> None:
    """Let the ranks of a group each compute a part of the sequences, which all of them are given whole.

    Sequences are padded to a length that the group, and a tensor group in it, divides; the loss does not get the
    padding. Raise UserError for a model that the group does not divide.
    """
    group = cast("ProcessGroup", meshes.context)
    unknown = [path for path in model.factory.constructors if path != "head"]
    if unknown:
        raise UserError(f"{KEY}: {', '.join(unknown)} (model.replace) might mix tokens of different ranks; set it to 1")
    raise_if_not_divided(model.config, meshes.sizes)
    own: Callable[..., Any] = model.forward
    model.group = meshes.model

    def forward(
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        head_fn: Callable[..., Any],
        attend: Attend | None = None,
        varlen: Varlen | None = None,
        **inputs: Any,
    ) -> Any:
        assert attend is None, "generation is not context-parallel"
        length, more = tokens.shape[1], (0, -tokens.shape[1] % meshes.sizes.model)
        if more[1]:
            tokens, positions, segments = F.pad(tokens, more), F.pad(positions, more), F.pad(segments, more, value=-1)
            varlen = None  # it is of sequences without padding
        whole = ContextAttend(model.attention(segments, positions, varlen), group)
        here = [own_slice(t, group) for t in (tokens, positions, segments)]
        out = own(*here, partial(_of_whole_sequences, head_fn, group, length), whole, **inputs)
        _sum_routings(model, group)
        return out

    model.forward = forward


def _of_whole_sequences(head_fn: Callable[..., Any], group: ProcessGroup, length: int, x: Tensor, head: Any) -> Any:
    """Call `head_fn` with the hidden states of all ranks, [B, t, D] → [B, length, D]."""
    if not isinstance(head, Head):  # each rank computes all of it, which counts once
        found = head_fn(all_gather(x, group)[:, :length], head)
        return tree_map_only(Tensor, partial(_counted_once, group=group), found)
    rows = len(head.weight) // group.size()
    first = group.rank() * rows
    head = replace(head, weight=head.weight[first : first + rows], vocab_start=head.vocab_start + first)
    return head_fn(all_gather(x, group, whole_gradient=True)[:, :length], head)


def _counted_once(value: Tensor, group: ProcessGroup) -> Tensor:
    """Return a value that each of the ranks has; its gradient is divided among them."""
    return exchange(value, group, lambda x, group: x.clone(), lambda gradient, group: gradient / group.size())


def _unchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


def _sum_routings(model: Decoder, group: ProcessGroup) -> None:
    """Sum the statistics of the routers over the ranks. Each computes the same loss of the sums, so the gradient of its
    own part is that of the sum."""
    routed: list[Any] = [layer.moe for layer in model.layers if getattr(layer.moe, "routing", None) is not None]
    if not routed:
        return
    found = [torch.cat((r.chosen, r.probability, r.tokens[None])) for r in (moe.routing for moe in routed)]
    for moe, values in zip(routed, exchange(torch.stack(found), group, summed, _unchanged), strict=True):
        chosen, probability, tokens = values.split((len(moe.routing.chosen), len(moe.routing.chosen), 1))
        moe.routing = Routing(chosen.detach(), probability, tokens.detach().squeeze(0))


def raise_if_not_divided(c: DecoderConfig, sizes: MeshSizes) -> None:
    """Raise UserError with everything that a tensor group, or a context group beside it, does not divide, and with the
    sizes that fit."""
    raise_if_indivisible(c, sizes.tensor)

    def wrong(ranks: int) -> list[str]:
        heads = {f"attention heads{of_tensor}": c.heads // sizes.tensor}
        if c.delta is not None:
            heads |= {"key heads of linear attention": c.delta.key_heads}
            heads |= {"value heads of linear attention": c.delta.value_heads}
        if c.head == "lm":
            heads[f"rows of the vocabulary{of_tensor}"] = c.padded // sizes.tensor
        found = [f"{n} {what}" for what, n in heads.items() if n % ranks]
        kv = c.kv_heads // sizes.tensor
        return [*found, f"{kv} key-value heads{of_tensor} (nor they it)"] if kv % ranks and ranks % kv else found

    of_tensor = f" that a tensor group of {sizes.tensor} leaves to a rank" if sizes.tensor > 1 else ""
    if found := wrong(sizes.context):
        fitting = [n for n in range(1, 2 * sizes.context + 1) if not wrong(n)]
        raise UserError(
            f"{KEY}: {sizes.context} does not divide the model's {', '.join(found)}; set it to one of "
            f"{', '.join(map(str, fitting))}"
        )
