"""Which token attends to which, and what computes it.

What differs between training on packed sequences and generating with a cache is an `Attend` object that is passed to
the layers. Documents of a packed sequence never attend to each other: on a CPU each is computed as a sequence of its
own (no mask separates documents, so none can be wrong), on a GPU FlexAttention skips the blocks between documents.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ptf.model.kernels.delta_rule import CPU_CHUNK, GPU_CHUNK, Chunks, Spans, convolve
from ptf.model.kernels.document_mask import BLOCK, DocumentMasks
from ptf.varlen import Varlen


class Attend(Protocol):
    """How queries attend to keys: causal over packed documents in training, over a KV cache in generation."""

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [B, T, heads, V].

        `q` is [B, T, heads, D], `k` is [B, T, kv_heads, D], and `v` is [B, T, kv_heads, V]; V is D but in latent
        attention. `layer` has the window, the scale and the sinks, and may have a `softcap`.
        """
        ...

    def delta(self, layer: Any, qkv: Tensor, decay: Tensor, beta: Tensor, /) -> Tensor:
        """Return the output of linear attention [B, T, value_heads, value_dim] (gated_delta.py).

        `qkv` [B, T, channels] is the convolution's input, `decay` and `beta` are [B, T, value_heads]; `layer` has the
        convolution's weights and divides its result into heads.
        """
        ...


def sdpa(layer: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Run torch's scaled dot-product attention with this layer's scale and sinks.

    `q` is [n, heads, Tq, D], `k` is [n, kv_heads, Tk, D], `v` is [n, kv_heads, Tk, V]; `visible` [.., Tq, Tk] is the
    mask, None for causal.

    A sink is implemented as one more key, before all others, whose value is 0. A further dimension holds its logit on
    the query's side, 1 on its own key and 0 on the other keys. A query is put before the others to match, so that
    causality alone lets each query attend to the sink.
    """
    # A CPU that multiplies no matrices in bf16 (AMX) is slower in bf16 than in fp32. On an AMD EPYC, 64 new tokens with
    # 128 before each take 5.0 ms in bf16 and 1.2 ms in fp32 with both conversions; a document of 192 tokens takes 4.6
    # and 2.2 ms, forward and backward together.
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
        return sdpa(layer, q.float(), k.float(), v.float(), visible).to(q.dtype)
    if getattr(layer, "softcap", None) is not None:  # torch's attention has no soft-capped scores
        assert layer.sinks is None, "no family has both"
        q = q.unflatten(1, (k.shape[1], -1)) * layer.scale  # [n, kv_heads, group, Tq, D]
        scores = soft_capped(q @ k[:, :, None].mT, layer)
        if visible is None:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ v[:, :, None]).flatten(1, 2)
    if layer.sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True, scale=layer.scale
        )
    logit = (layer.sinks.to(q.dtype) / layer.scale)[:, None, None].expand(*q.shape[:3], 1)
    q = torch.cat((q, logit), -1)
    key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + 1)
    key[..., -1] = 1
    k, v = torch.cat((key, F.pad(k, (0, 1))), 2), F.pad(v, (0, 1, 1, 0))
    if visible is None:
        out = F.scaled_dot_product_attention(
            F.pad(q, (0, 0, 1, 0)), k, v, is_causal=True, enable_gqa=True, scale=layer.scale
        )[:, :, 1:]
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=F.pad(visible, (1, 0), value=True), enable_gqa=True, scale=layer.scale
        )
    return out[..., :-1]


class PackedDelta:
    """Linear attention inside each document of a packed batch, from a state of zeros."""

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        self.positions = positions
        self.chunks = Chunks.of(segments, GPU_CHUNK if segments.is_cuda else CPU_CHUNK)
        if bool((positions.reshape(-1)[self.chunks.starts] > 0).any()):
            raise ValueError("a document that continues a shared prefix has no state to begin with")

    def __call__(self, layer: Any, qkv: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [B, T, value_heads, value_dim] and the documents' last states [documents, value_heads,
        key_dim, value_dim]; the other arguments are those of `Attend.delta`."""
        q, k, v = layer.heads(convolve(qkv, self.positions, layer.conv.weight))
        q, k, v, decay, beta = (t.flatten(0, 1) for t in (q, k, v, decay, beta))
        out, states = layer.kernels.delta_rule(q, k, v, decay, beta, self.chunks)
        return out.unflatten(0, qkv.shape[:2]), states


def soft_capped(scores: Tensor, layer: Any) -> Tensor:
    """Return cap · tanh(scores / cap), or the scores where the attention `layer` has no `softcap`."""
    cap = getattr(layer, "softcap", None)
    return scores if cap is None else cap * (scores / cap).tanh()


class InsideDocuments:
    """An `Attend` inside each document of a packed batch; the classes below differ in what computes softmax
    attention."""

    segments: Tensor
    positions: Tensor

    @functools.cached_property
    def packed_delta(self) -> PackedDelta:
        """Linear attention in this batch."""
        return PackedDelta(self.segments, self.positions)

    def delta(self, layer: Any, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See Attend."""
        return self.packed_delta(layer, qkv, decay, beta)[0]


class PerDocument(InsideDocuments):
    """Causal attention inside each document, computed as a few dense batches of documents of similar length.

    A shorter document is filled up on the right; causality alone keeps its tokens from attending to the filling. On 2
    CPU cores this is 2.2 to 2.7 times as fast as a dense block mask, and FlexAttention has no backward on a CPU (torch
    2.13). A document that continues a shared prefix is computed with that prefix before it, and the prefix's outputs
    are dropped.
    """

    ratio = 1.25  # longest to shortest in one batch: at most a fifth of the batch is filling

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        self.segments, self.positions = segments, positions
        flat = segments.reshape(-1)
        starts, lengths, *_ = Spans.of(segments)
        prefix_length = positions.reshape(-1).numpy()[starts]
        # for each document, the start of the document whose first `prefix_length` tokens are its prefix
        whole = np.maximum.accumulate(np.where(prefix_length == 0, starts, 0))
        lengths = lengths + prefix_length
        order = np.argsort(lengths, kind="stable")
        self.groups: list[tuple[Tensor, Tensor | None]] = []
        # for each position, its index in the concatenated results; padding takes the row of zeros at the end
        back = np.full(len(flat), -1, np.int64)
        done = first = 0
        while first < len(order):
            last = int(np.searchsorted(lengths[order], lengths[order[first]] * self.ratio, side="right"))
            members = order[first:last]
            step = np.arange(int(lengths[members[-1]]))
            before = step < prefix_length[members][:, None]  # [n, width]
            inside = (step < lengths[members][:, None]) & ~before
            own = (starts - prefix_length)[members][:, None] + np.minimum(step, lengths[members][:, None] - 1)
            index = np.where(before, whole[members][:, None] + step, own)
            own_positions = index[inside]
            back[own_positions] = done + np.arange(len(own_positions))
            done += len(own_positions)
            keep = None if inside.all() else torch.from_numpy(np.flatnonzero(inside.reshape(-1)))
            self.groups.append((torch.from_numpy(index), keep))
            first = last
        back[back < 0] = done
        self.back = torch.from_numpy(back)

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [B, T, heads, V]; the arguments are those of `Attend`."""
        flat = [t.flatten(0, 1) for t in (q, k, v)]  # [B·T, heads, D]
        parts = []
        for index, keep in self.groups:
            # [n, heads, width, D]
            a, b, c = (t.index_select(0, index.reshape(-1)).unflatten(0, index.shape).transpose(1, 2) for t in flat)
            out = sdpa(layer, a, b, c, band(index.shape[1], layer.window)).transpose(1, 2).flatten(0, 1)
            parts.append(out if keep is None else out.index_select(0, keep))
        parts.append(q.new_zeros(1, q.shape[2], v.shape[3]))
        # indexing with brackets takes three times as long, forward and backward together
        return torch.cat(parts).index_select(0, self.back).unflatten(0, q.shape[:2])


@functools.lru_cache(maxsize=64)
def band(width: int, window: int | None) -> Tensor | None:
    """Return the causal mask of a sliding window for a document of this width, [width, width]; None where it is plain
    causal."""
    if window is None or window >= width:
        return None
    # in place: differences of positions would take 8 bytes a pair, 8 GiB for a document of 32,768 tokens
    return torch.ones(width, width, dtype=torch.bool).tril_().triu_(1 - window)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, heads, T, V] and the log-sum-exp of each query [B, heads, T]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": True}
    if softcap is not None:
        options["score_mod"] = lambda score, *place: softcap * (score / softcap).tanh()
    out, more = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    assert more.lse is not None
    return out, more.lse


FLEX_VARIANTS = 128  # compiled at most: for each shape, window, scale, soft-cap, dtype, and with and without gradients


@functools.cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile FlexAttention. Without `fullgraph`, torch would silently run the unfused version, which computes the
    scores of all pairs, for every variant beyond its limit (8)."""
    compiler: Any = torch.compile  # whose type knows no recompile_limit yet
    return compiler(_flex, dynamic=False, fullgraph=True, recompile_limit=FLEX_VARIANTS)


def bucket(size: int) -> int:
    """Return the smallest size not below this one of those that attention is compiled for.

    These are 1 to 8, and of each doubling beyond them four: 10, 12, 14, 16, 20, 24, ….
    """
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


class Flex(InsideDocuments):
    """The same attention on a GPU: one FlexAttention call a layer, whose block mask is causal inside each document.

    There is one mask a window size. A sink takes its share of the softmax afterwards: out · sigmoid(log-sum-exp −
    sink). Sequences and blocks of a sequence are padded to the numbers of `bucket`, so that batches of many shapes
    (contexts to answer, sequences to score) need few compiled variants.
    """

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        self.segments, self.positions = segments, positions
        self.sequences, self.length = sequences, length = segments.shape
        self.added = bucket(sequences) - sequences, BLOCK * bucket(-(-length // BLOCK)) - length
        if any(self.added):
            added = (0, self.added[1], 0, self.added[0])
            segments, positions = F.pad(segments, added, value=-1), F.pad(positions, added)
        # the block mask of a window size (None: unlimited), made at its first use
        self.mask = functools.cache(DocumentMasks(segments, positions).mask)

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [B, T, heads, V]; the arguments are those of `Attend`.

        Raises RuntimeError where this would compile more than FLEX_VARIANTS variants.
        """
        if any(self.added):  # before the transposition: torch compiles for strides, too
            q, k, v = (F.pad(t, (0, 0, 0, 0, 0, self.added[1], 0, self.added[0])) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        try:
            cap = () if (softcap := getattr(layer, "softcap", None)) is None else (softcap,)
            out, lse = _compiled_flex()(q, k, v, self.mask(layer.window), layer.scale, *cap)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":  # whose module takes a second to import
                raise
            raise RuntimeError(
                f"FlexAttention would be compiled for more than {FLEX_VARIANTS} variants; the last has q of shape "
                f"{list(q.shape)} in {q.dtype} and window {layer.window}. Lengths that vary come from "
                "train.deterministic or from rollout.engine: native; without them sequences have one length"
            ) from error
        if layer.sinks is not None:
            out = out * torch.sigmoid(lse - layer.sinks.float()[:, None])[..., None].to(out.dtype)
        return out[: self.sequences, :, : self.length].transpose(1, 2)


def inside_documents(segments: Tensor, positions: Tensor, varlen: Varlen | None = None) -> Attend:
    """Return the attention of a batch: FlexAttention on CUDA, dense batches of documents elsewhere."""
    return Flex(segments, positions) if segments.is_cuda else PerDocument(segments, positions)
