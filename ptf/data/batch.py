"""Packed sequences as tensors: all that a loss gets, and the only torch in ptf.data.

All columns are aligned with the targets. Position t of a sequence predicts `targets[t]`, counts `loss_weights[t]`, and
carries the columns of the token that it predicts; the shift by one happens here and nowhere else.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptf.data.document import Document, PackUnit
from ptf.varlen import Varlen


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; a GPU copies from page-locked memory while the host goes on."""
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor
    return pinned.to(device, non_blocking=True)


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
        return lay_out(sequences, seq_len, max(1, len(sequences)))[0]

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device. A GPU copies from page-locked memory while the host goes on."""
        return self if device.type == "cpu" else self._each(partial(moved, device=device))

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._each(note)
        return found

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with every tensor changed."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(
            self,
            **changed,
            varlen=self.varlen._replace(cu_seqlens=change(self.varlen.cu_seqlens)),
            token_columns={name: change(values) for name, values in self.token_columns.items()},
        )

    def through(self, model: Callable[..., Any], head_fn: Callable[..., Any]) -> Any:
        """Return what a model makes of the batch: `head_fn` of its hidden states and its head."""
        return model(self.tokens, self.positions, self.segments, head_fn, varlen=self.varlen)

    def per_document(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return sums over documents, weighted by `weights` (default: the batch's): [B, T] → [documents]."""
        flat = (values * (self.loss_weights if weights is None else weights)).reshape(-1)
        index = self.segments.reshape(-1)
        out = torch.zeros(len(self.lengths) + 1, dtype=flat.dtype, device=flat.device)
        return out.index_add(0, index + 1, flat)[1:]  # padding (-1) falls into slot 0


@dataclass
class Buffers:
    """A pool of buffers, each of which is used again when no array refers to it any more.

    Touching fresh memory for the first time costs more than laying out a sequence there. `pinned`: page-locked memory,
    from which a GPU copies while the host goes on; what is made of it must be kept until the copy is made.
    """

    pinned: bool = False
    _made: list[np.ndarray] = field(default_factory=list)

    def buffer(self, n: int) -> np.ndarray:
        """Return a buffer of n bytes, not initialised. It is in use as long as a view of it exists."""
        self._made = [made for made in self._made if made.nbytes == n]
        for i in range(len(self._made)):
            if sys.getrefcount(self._made[i]) == HELD_HERE:
                return self._made[i]
        fresh = torch.empty(n, dtype=torch.uint8, pin_memory=True).numpy() if self.pinned else np.empty(n, np.uint8)
        self._made.append(fresh)
        del fresh
        return self._made[-1]


HELD_HERE = 2  # the list, and the argument of getrefcount


def lay_out(
    sequences: Sequence[Sequence[PackUnit]], seq_len: int, micro_batch_sequences: int, buffers: Buffers | None = None
) -> list[Batch]:
    """Lay out sequences of at most `seq_len` tokens as batches of `micro_batch_sequences`; the last one may have fewer.

    The batches are slices of the same arrays, which lie in `buffers`.
    """
    arrays = _arrays(len(sequences), seq_len, buffers or Buffers())
    token_columns: dict[str, np.ndarray] = {}  # with zeros for documents that do not carry them
    for document in (document for sequence in sequences for unit in sequence for document in unit):
        for name, values in document.token_columns.items():
            if name not in token_columns:
                token_columns[name] = np.zeros((len(sequences), seq_len, *values.shape[1:]), values.dtype)
    batches = []
    for first in range(0, max(1, len(sequences)), micro_batch_sequences):
        part = slice(first, first + micro_batch_sequences)
        own = {name: values[part] for name, values in arrays.items()}
        own_columns = {name: values[part] for name, values in token_columns.items()}
        batches.append(_lay_out_batch(sequences[part], own, own_columns))
    return batches


def _arrays(sequences: int, seq_len: int, buffers: Buffers) -> dict[str, np.ndarray]:
    """Return the arrays of sequences that hold nothing but padding."""
    n = sequences * seq_len
    buffer = buffers.buffer(4 * 8 * n + 4 * n)
    arrays: dict[str, np.ndarray] = {
        name: buffer[i * 8 * n : (i + 1) * 8 * n].view(np.int64)
        for i, name in enumerate(("tokens", "targets", "positions", "segments"))
    }
    arrays["loss_weights"] = buffer[4 * 8 * n :].view(np.float32)
    for name, values in arrays.items():
        values[:] = -1 if name == "segments" else 0
    return {name: values.reshape(sequences, seq_len) for name, values in arrays.items()}


def _lay_out_batch(
    sequences: Sequence[Sequence[PackUnit]], arrays: Mapping[str, np.ndarray], token_columns: Mapping[str, np.ndarray]
) -> Batch:
    """Fill in the documents of one batch. A document's last token has no target."""
    tokens, targets, positions = arrays["tokens"], arrays["targets"], arrays["positions"]
    segments, loss_weights = arrays["segments"], arrays["loss_weights"]
    documents: list[Document] = []
    units: list[int] = []  # of each document
    spans: list[int] = []  # the lengths of documents and of the padding behind those of a sequence
    number = -1
    for row, sequence in enumerate(sequences):
        start = 0
        for unit in sequence:
            number += 1
            for document in unit:
                n, before = len(document.tokens), document.prefix_length
                end = start + n
                assert end <= tokens.shape[1], f"sequence {row} holds {end} tokens or more, not {tokens.shape[1]}"
                tokens[row, start:end] = document.tokens
                targets[row, start : end - 1] = document.tokens[1:]
                positions[row, start:end] = np.arange(before, before + n)
                segments[row, start:end] = len(documents)
                loss_weights[row, start : end - 1] = document.loss_weights[1:]
                for name, values in document.token_columns.items():
                    token_columns[name][row, start : end - 1] = values[1:]
                documents.append(document)
                units.append(number)
                spans.append(n)
                start = end
        spans.append(tokens.shape[1] - start)
    of_unit = np.array(units, np.int64)
    ends = np.cumsum([n for n in spans if n], dtype=np.int32)
    prefix_lengths = tuple(document.prefix_length for document in documents)
    return Batch(
        **{name: torch.from_numpy(values) for name, values in arrays.items()},
        units=torch.from_numpy(of_unit),
        lengths=tuple(len(document.tokens) for document in documents),
        prefix_lengths=prefix_lengths,
        sources=tuple(document.source for document in documents),
        trained_positions=torch.from_numpy(np.flatnonzero(loss_weights)),
        pairs=torch.from_numpy(np.flatnonzero(of_unit[1:] == of_unit[:-1])),
        varlen=Varlen(torch.from_numpy(np.append(np.int32(0), ends)), max(spans, default=0), any(prefix_lengths)),
        token_columns={name: torch.from_numpy(values) for name, values in token_columns.items()},
    )
