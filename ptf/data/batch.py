"""Packed sequences as tensors: all that a loss gets, and the only torch in ptf.data.

All columns are aligned with the targets. Position t of a sequence predicts `targets[t]`, counts `loss_weights[t]`, and
carries the columns of the token that it predicts; the shift by one happens here and nowhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
        if device.type == "cpu":
            return self
        return replace(
            self,
            **{name: moved(tensor, device) for name, tensor in self._own_tensors().items()},
            varlen=self.varlen._replace(cu_seqlens=moved(self.varlen.cu_seqlens, device)),
            token_columns={name: moved(values, device) for name, values in self.token_columns.items()},
        )

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the batch."""
        return [*self._own_tensors().values(), self.varlen.cu_seqlens, *self.token_columns.values()]

    def _own_tensors(self) -> dict[str, Tensor]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def through(self, model: Callable[..., Any], head_fn: Callable[..., Any]) -> Any:
        """Return what a model makes of the batch: `head_fn` of its hidden states and its head."""
        return model(self.tokens, self.positions, self.segments, head_fn, varlen=self.varlen)

    def per_document(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return sums over documents, weighted by `weights` (default: the batch's): [B, T] → [documents]."""
        flat = (values * (self.loss_weights if weights is None else weights)).reshape(-1)
        index = self.segments.reshape(-1)
        out = torch.zeros(len(self.lengths) + 1, dtype=flat.dtype, device=flat.device)
        return out.index_add(0, index + 1, flat)[1:]  # padding (-1) falls into slot 0


ARRAYS = {
    **dict.fromkeys(("tokens", "targets", "positions", "segments"), np.int64),
    "loss_weights": np.float32,
}


def lay_out(sequences: Sequence[Sequence[PackUnit]], seq_len: int, micro_batch_sequences: int) -> list[Batch]:
    """Lay out sequences of at most `seq_len` tokens as batches of `micro_batch_sequences`; the last one may have fewer.

    All have the columns that any document carries, with zeros for the others.
    """
    documents = (document for sequence in sequences for unit in sequence for document in unit)
    columns = {name: values for document in documents for name, values in document.token_columns.items()}
    parts = (
        sequences[first : first + micro_batch_sequences]
        for first in range(0, max(1, len(sequences)), micro_batch_sequences)
    )
    return [_lay_out_batch(part, seq_len, columns) for part in parts]


def _lay_out_batch(sequences: Sequence[Sequence[PackUnit]], seq_len: int, columns: Mapping[str, np.ndarray]) -> Batch:
    """Lay out the documents of one batch, with columns like those given. A document's last token has no target."""
    shape = len(sequences), seq_len
    arrays = {name: np.full(shape, -1 if name == "segments" else 0, dtype) for name, dtype in ARRAYS.items()}
    tokens, targets, positions, segments, loss_weights = arrays.values()
    token_columns = {name: np.zeros((*shape, *like.shape[1:]), like.dtype) for name, like in columns.items()}
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
                assert end <= seq_len, f"sequence {row} holds {end} tokens or more, not {seq_len}"
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
        spans.append(seq_len - start)
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
