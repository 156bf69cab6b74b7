"""Packed sequences as tensors: all that a loss gets, and the only torch in ptf.data.

All columns are aligned with the targets. Position t of a sequence predicts `targets[t]`, counts `loss_weights[t]`, and
carries the columns of the token that it predicts; the shift by one happens here and nowhere else.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from ptf.data.sample import PackUnit, Sample
from ptf.varlen import Varlen


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; a GPU copies from page-locked memory while the host goes on."""
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False, slots=True)
class Documents:
    """The documents of packed sequences as columns with one entry per document: what laying them out needs."""

    sequences: Sequence[int]  # documents of each sequence
    units: Sequence[int]  # pack units of each sequence
    owned: Sequence[int]  # documents of each pack unit
    lengths: Sequence[int]  # tokens of each document
    tokens: np.ndarray  # [tokens of all documents] int32, one document after the other
    weights: np.ndarray  # [tokens of all documents] float32
    sources: Sequence[str]
    prefix_lengths: Sequence[int]  # tokens that each document shares with an earlier one, and omits
    token_columns: Sequence[Mapping[str, np.ndarray]]  # per-token values of each document

    @staticmethod
    def of(sequences: Sequence[Sequence[PackUnit]]) -> "Documents":
        """Return the columns of sequences that are given as pack units."""
        samples: list[Sample] = list(chain.from_iterable(chain.from_iterable(sequences)))
        return Documents(
            [sum(map(len, sequence)) for sequence in sequences],
            [*map(len, sequences)],
            [*map(len, chain.from_iterable(sequences))],
            [len(sample.tokens) for sample in samples],
            np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)], dtype=np.int32),
            np.concatenate([sample.loss_weights for sample in samples] or [np.zeros(0, np.float32)]),
            [sample.source for sample in samples],
            [sample.prefix_length for sample in samples],
            [sample.token_columns for sample in samples],
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed sequences: documents lie end to end from the left; the rest of a sequence is padding."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64, next token inside the same document
    # [B, T] int64: 0, 1, … in every document; n, n + 1, … in one whose first n tokens are omitted because it shares
    # them with the nearest document before it that begins at 0
    positions: Tensor
    segments: Tensor  # [B, T] int64, document number in the batch, -1 is padding
    loss_weights: Tensor  # [B, T] float32, loss weight of each target
    units: Tensor  # [documents] int64, the number of the pack unit that a document belongs to
    lengths: tuple[int, ...]  # per document, on the host
    prefix_lengths: tuple[int, ...]  # per document, the tokens before its first, which are in an earlier document
    sources: tuple[str, ...]  # per document
    # what the host knows, so that a GPU need not be waited for:
    trained_positions: Tensor  # [trained] int64, indices of the positions of [B · T] whose weight is not 0
    pairs: Tensor  # [pairs] int64, the documents whose next document belongs to the same pack unit
    varlen: Varlen  # arguments of attention over documents of different lengths
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)  # [B, T] or [B, T, k], aligned with targets

    @staticmethod
    def of(sequences: Sequence[Sequence[PackUnit]], seq_len: int) -> "Batch":
        """Lay out sequences of pack units, each of at most `seq_len` tokens."""
        return lay_out(Documents.of(sequences), seq_len, max(1, len(sequences)))[0]

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device. A GPU copies from page-locked memory while the host goes on."""
        if device.type == "cpu":
            return self

        move = partial(moved, device=device)
        return Batch(
            move(self.tokens),
            move(self.targets),
            move(self.positions),
            move(self.segments),
            move(self.loss_weights),
            move(self.units),
            self.lengths,
            self.prefix_lengths,
            self.sources,
            move(self.trained_positions),
            move(self.pairs),
            self.varlen._replace(cu_seqlens=move(self.varlen.cu_seqlens)),
            {k: move(v) for k, v in self.token_columns.items()},
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        own = [self.tokens, self.targets, self.positions, self.segments, self.loss_weights, self.units]
        return [*own, self.trained_positions, self.pairs, self.varlen.cu_seqlens, *self.token_columns.values()]

    def per_document(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return sums over documents, weighted by `weights` (default: the batch's): [B, T] → [documents]."""
        flat = (values * (self.loss_weights if weights is None else weights)).reshape(-1)
        index = self.segments.reshape(-1)
        out = torch.zeros(len(self.lengths) + 1, dtype=flat.dtype, device=flat.device)
        return out.index_add(0, index + 1, flat)[1:]  # padding (-1) falls into slot 0


@dataclass
class Memory:
    """A pool of buffers, each of which is used again when no array refers to it any more.

    Touching fresh memory for the first time costs more than laying out a sequence there. `pinned`: page-locked memory,
    from which a GPU copies while the host goes on; what is made of it must be kept until the copy is made.
    """

    pinned: bool = False
    _blocks: list[np.ndarray] = field(default_factory=list)

    def block(self, n: int) -> np.ndarray:
        """Return a block of n bytes, not initialised. It is in use as long as a view of it exists."""
        self._blocks = [block for block in self._blocks if block.nbytes == n]
        for i in range(len(self._blocks)):
            if sys.getrefcount(self._blocks[i]) == HELD_HERE:
                return self._blocks[i]
        fresh = torch.empty(n, dtype=torch.uint8, pin_memory=True).numpy() if self.pinned else np.empty(n, np.uint8)
        self._blocks.append(fresh)
        del fresh
        return self._blocks[-1]


HELD_HERE = 2  # the list, and the argument of getrefcount


def lay_out(
    documents: Documents, seq_len: int, micro_batch_sequences: int, memory: Memory | None = None
) -> list[Batch]:
    """Lay out sequences of at most `seq_len` tokens as batches of `micro_batch_sequences`; the last one may have fewer.

    The batches are slices of the same arrays, which lie in `memory`: numpy's calls cost more than copying a short
    document, so all sequences are laid out together.
    """
    sequences = len(documents.sequences)
    lengths = np.array(documents.lengths, np.int64)
    before = np.cumsum([0, *documents.sequences])  # documents before each sequence, and in all
    ends = np.concatenate([[0], np.cumsum(lengths)])
    filled = np.diff(ends[before])
    assert (filled <= seq_len).all(), (
        f"sequence {int(filled.argmax())} holds {int(filled.max(initial=0))} tokens, more than {seq_len}"
    )
    # where each document starts in the padded sequences, laid end to end
    starts = ends[:-1] + np.repeat(np.arange(sequences) * seq_len - ends[before[:-1]], documents.sequences)
    cuts, pads = before.tolist(), (seq_len - filled).tolist()

    arrays = _arrays(sequences, seq_len, memory or Memory())
    _fill_tokens(arrays, documents, pads, ends[before].tolist(), starts + lengths - 1)

    token_columns = _spread_columns(documents.token_columns, starts.tolist(), (sequences, seq_len))
    units_before, owners = np.cumsum([0, *documents.units]), np.repeat(np.arange(len(documents.owned)), documents.owned)
    firsts = range(0, max(1, sequences), micro_batch_sequences)  # the first sequence of each batch
    in_batches = np.diff(before[[*firsts, sequences]])  # documents in each batch
    numbers = np.arange(len(lengths)) - np.repeat(before[[*firsts]], in_batches)
    offsets = starts - np.array(documents.prefix_lengths, np.int64)
    room = before[1:] + np.arange(sequences)  # the padding of a sequence is one more document after its own
    spans, numbers, offsets = (
        _interleave(lengths, room, seq_len - filled),
        _interleave(numbers, room, -1),
        _interleave(offsets, room, 0),
    )
    document_cuts = [n + sequence for sequence, n in enumerate(cuts)]
    arrays["segments"].reshape(-1)[:] = np.repeat(numbers, spans)
    np.subtract(np.arange(sequences * seq_len), np.repeat(offsets, spans), out=arrays["positions"].reshape(-1))
    arrays["positions"][arrays["segments"] < 0] = 0
    batches = []
    for first in firsts:
        end = min(first + micro_batch_sequences, sequences)
        start, stop = cuts[first], cuts[end]
        part = {name: torch.from_numpy(values[first:end]) for name, values in arrays.items() if name != "own"}
        units = owners[start:stop] - units_before[first]
        prefix_lengths = tuple(documents.prefix_lengths[start:stop])
        batches.append(
            Batch(
                **part,
                units=torch.from_numpy(units),
                lengths=tuple(documents.lengths[start:stop]),
                prefix_lengths=prefix_lengths,
                sources=tuple(documents.sources[start:stop]),
                trained_positions=torch.from_numpy(np.flatnonzero(arrays["loss_weights"][first:end] != 0)),
                pairs=torch.from_numpy(np.flatnonzero(units[1:] == units[:-1])),
                varlen=_varlen(spans[document_cuts[first] : document_cuts[end]], any(prefix_lengths)),
                token_columns={name: torch.from_numpy(values[first:end]) for name, values in token_columns.items()},
            )
        )
    return batches


def _varlen(lengths: np.ndarray, shares_prefix: bool) -> Varlen:
    """Return the `Varlen` of documents and paddings of these lengths; those of length 0 are left out."""
    ends = np.cumsum(lengths[lengths > 0], dtype=np.int32)
    return Varlen(torch.from_numpy(np.append(np.int32(0), ends)), int(lengths.max(initial=0)), shares_prefix)


def _arrays(sequences: int, seq_len: int, memory: Memory) -> dict[str, np.ndarray]:
    """Return the arrays of a batch, not filled.

    `own` are the weights of the tokens themselves; `loss_weights` is the same memory, one token later.
    """
    n = sequences * seq_len
    block = memory.block(4 * (8 * n) + 4 * (n + 1))
    result = {
        name: block[i * 8 * n : (i + 1) * 8 * n].view(np.int64)
        for i, name in enumerate(("tokens", "targets", "positions", "segments"))
    }
    loss = block[4 * (8 * n) :].view(np.float32)
    return {
        name: values.reshape(sequences, seq_len)
        for name, values in {**result, "own": loss[:n], "loss_weights": loss[1:]}.items()
    }


def _fill_tokens(
    arrays: Mapping[str, np.ndarray],
    documents: Documents,
    pads: list[int],
    sequence_ends: Sequence[int],
    last: np.ndarray,
) -> None:
    """Fill in tokens, targets and weights.

    `sequence_ends` are the tokens up to each sequence, `pads` is the padding of each sequence, and `last` the places of
    the documents' last tokens, which have no target.
    """
    for name, values in (("tokens", documents.tokens), ("own", documents.weights)):
        zeros = np.zeros(max(pads, default=0), values.dtype)
        padded = [zeros[:0]]  # the values of each sequence, and the zeros that pad it
        for (start, end), n in zip(pairwise(sequence_ends), pads, strict=True):
            padded += (values[start:end], zeros[:n])
        np.concatenate(padded, out=arrays[name].reshape(-1), casting="same_kind")
    arrays["targets"].reshape(-1)[:-1] = arrays["tokens"].reshape(-1)[1:]
    arrays["targets"].reshape(-1)[last], arrays["loss_weights"].reshape(-1)[last] = 0, 0.0
    arrays["targets"][:, -1], arrays["loss_weights"][:, -1] = 0, 0.0


def _interleave(values: np.ndarray, at: np.ndarray, more: np.ndarray | int) -> np.ndarray:
    """Return `values` with further elements inserted so that they stand at the indices `at`."""
    result = np.empty(len(values) + len(at), np.int64)
    others = np.ones(len(result), bool)
    others[at] = False
    result[at], result[others] = more, values
    return result


def _spread_columns(
    carried: Sequence[Mapping[str, np.ndarray]], starts: Sequence[int], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Return each column for all sequences, with zeros for documents that do not carry it."""
    result: dict[str, np.ndarray] = {}
    for at, token_columns in zip(starts, carried, strict=True):
        for name, values in token_columns.items():
            if name not in result:
                result[name] = np.zeros((shape[0] * shape[1], *values.shape[1:]), values.dtype)
            result[name][at : at + len(values) - 1] = values[1:]
    return {name: values.reshape(*shape, *values.shape[1:]) for name, values in result.items()}
