"""The gated delta rule (Yang, Kautz & Hatamizadeh, Gated Delta Networks, 2025) and the short convolution before it.

Each head has a state S [key_dim, value_dim], which begins at zero. A token with decay g ≤ 0 and strength β changes it
and reads from it:

    S ← e^g S;   S ← S + β k (v − Sᵀ k)ᵀ;   output = Sᵀ q

Training computes chunks of tokens with matrix products (section 3.3 of the paper): within a chunk, the changes of all
tokens are the solution of one triangular system, and only the state goes from chunk to chunk. A chunk begins where a
document begins, so documents share nothing: what is before a document's first token is selected to be zero (by an index
or `where`). It is never multiplied by zero, which would let NaN and infinity through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# tokens of a chunk. Forward and backward, 16 heads of 128 over 8 documents of 512 tokens take 1.4, 1.0 and 1.1 CPU-s
# with 16, 32 and 64 on an AMD EPYC (one thread); 32 fills up short documents less.
CPU_CHUNK, GPU_CHUNK = 32, 64


class Spans(NamedTuple):
    """The documents of a packed batch: their first tokens in the flat batch, and their lengths; [documents] each.

    `bounds` are the beginnings of documents and of the padding between them, with the end of the batch; `numbers` says
    which of these pieces are documents.
    """

    starts: np.ndarray
    lengths: np.ndarray
    bounds: np.ndarray
    numbers: np.ndarray

    @staticmethod
    def of(segments: Tensor) -> "Spans":
        """Find the documents of a batch; `segments` [B, T] numbers them, and is negative at padding."""
        flat = segments.reshape(-1).cpu().numpy()
        starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 1))
        lengths = np.diff(starts, append=len(flat))
        real = flat[starts] >= 0
        return Spans(starts[real], lengths[real], np.append(starts, len(flat)), np.flatnonzero(real))


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a packed batch of n tokens is divided into chunks of `size` tokens, the first chunks of all documents first.

    Documents are ordered by their number of chunks, the longest first, so that those which have a chunk k are the first
    `counts[k]` of the documents.
    """

    size: int
    index: Tensor  # [chunks, size] the token of each place; n, where a chunk is longer than its document
    back: Tensor  # [n] the place of each token; chunks · size at padding
    counts: Sequence[int]
    rank: Tensor  # [documents] the place of each document in that order
    starts: Tensor  # [documents] the first token of each document, and
    ends: Tensor  # its last one
    bounds: Tensor  # [pieces + 1] where documents and the padding between them begin, and the end of the batch
    numbers: Tensor  # [documents] which of these pieces are documents

    @staticmethod
    def of(segments: Tensor, size: int) -> "Chunks":
        """Divide the documents of a batch; `segments` is [B, T]."""
        starts, lengths, bounds, numbers = Spans.of(segments)
        n, chunks = segments.numel(), -(-lengths // size)
        order = np.argsort(-chunks, kind="stable")
        counts = [int((chunks > k).sum()) for k in range(int(chunks.max(initial=0)))]
        document = np.concatenate([order[:count] for count in counts]) if counts else np.zeros(0, np.int64)
        number = np.repeat(np.arange(len(counts)), counts)  # of each chunk in its document
        at = number[:, None] * size + np.arange(size)  # [chunks, size] place in the document
        inside = at < lengths[document][:, None]
        index = np.where(inside, starts[document][:, None] + at, n)
        back = np.full(n + 1, index.size)
        back[index.reshape(-1)[inside.reshape(-1)]] = np.flatnonzero(inside.reshape(-1))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))

        def there(a: np.ndarray) -> Tensor:
            return torch.from_numpy(a).to(segments.device)

        places = there(index), there(back[:n])
        of_documents = there(rank), there(starts), there(starts + lengths - 1)
        return Chunks(size, *places, counts, *of_documents, there(bounds), there(numbers))

    def to(self, device: torch.device) -> "Chunks":
        """Return the chunks with their tensors on a device."""
        tensors = {f.name: t.to(device) for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}
        return replace(self, **tensors)

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of the tokens by chunk, [n, ..] → [chunks, size, ..]; zero where there is no token."""
        return _with_zero(x).index_select(0, self.index.reshape(-1)).unflatten(0, (-1, self.size))

    def scatter(self, x: Tensor) -> Tensor:
        """Return the values by token, [chunks, size, ..] → [n, ..]; zero at padding."""
        return _with_zero(x.flatten(0, 1)).index_select(0, self.back)


def _with_zero(x: Tensor) -> Tensor:
    """Return x [n, ..] with a row of zeros at its end."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))


def convolve(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    """Return the causal convolution of each channel inside each document, [B, T, C].

    `positions` [B, T] are the tokens' places in their documents; `weight` is [C, 1, width], whose last column belongs
    to the token itself.
    """
    width = weight.shape[-1]
    out = x * weight[:, 0, -1]
    for back in range(1, width):
        before = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        out = out + torch.where((positions >= back)[..., None], before, 0) * weight[:, 0, width - 1 - back]
    return out


def windows(x: Tensor, chunks: Chunks, width: int) -> Tensor:
    """Return the last `width` − 1 inputs of each document, [documents, width − 1, C], for the next token's convolution.

    `x` is [B, T, C]; what is before a document's first token is zero.
    """
    at = chunks.ends[:, None] - torch.arange(width - 2, -1, -1, device=x.device)
    return torch.where((at >= chunks.starts[:, None])[..., None], x.flatten(0, 1)[at.clamp(min=0)], 0)


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Apply the rule to a packed batch of n tokens.

    `q` and `k` are [n, heads, key_dim], `v` is [n, heads, value_dim], `decay` (g) and `beta` are [n, heads]. Return the
    outputs [n, heads, value_dim] and the documents' last states [documents, heads, key_dim, value_dim], in the
    documents' own order. It is computed in fp32, or in fp64 for inputs in fp64.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    # [chunks, heads, size, ..]
    q, k, v = (chunks.gather(x.to(wide)).transpose(1, 2) for x in (q, k, v))
    # [chunks, heads, size]
    decay, beta = (chunks.gather(x.to(wide)).transpose(1, 2) for x in (decay, beta))
    total = decay.cumsum(-1)
    places = torch.arange(chunks.size, device=q.device)
    later = places[:, None] < places
    between = (total[..., None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # [.., size, size]
    # each token's change depends on those of the tokens before it: (I + A) changes = β (v − e^G k S)
    a = ((beta[..., None] * k) @ k.mT * between).masked_fill(later | (places[:, None] == places), 0)
    right = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), -1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    own, of_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    reading = q * total.exp()[..., None]
    adding = (k * (total[..., -1:] - total).exp()[..., None]).mT  # [.., key_dim, size]
    kept = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(len(chunks.rank), q.shape[1], k.shape[-1], v.shape[-1])
    first, read, changes = 0, [], []
    last: list[Tensor] = []  # states of the documents that have ended, in reverse order
    for count in chunks.counts:
        here = slice(first, first + count)
        if count < len(state):
            last.append(state[count:])
            state = state[:count]
        changes.append(own[here] - of_state[here] @ state)
        read.append(reading[here] @ state)
        state = kept[here] * state + adding[here] @ changes[-1]
        first += count
    states = torch.cat([state, *reversed(last)])
    out = torch.cat(read) + (q @ k.mT * between) @ torch.cat(changes) if read else torch.zeros_like(v)
    return chunks.scatter(out.transpose(1, 2)), states.index_select(0, chunks.rank)


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rule to one token of each of n documents.

    `state` is [n, heads, key_dim, value_dim], `q` and `k` are [n, heads, key_dim], `v` is [n, heads, value_dim],
    `decay` and `beta` are [n, heads]. Return the outputs [n, heads, value_dim] and the new states.
    """
    q, k, v, decay, beta = (x.to(state.dtype) for x in (q, k, v, decay, beta))
    state = decay.exp()[..., None, None] * state
    change = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state = state + k[..., None] * change[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2), state
