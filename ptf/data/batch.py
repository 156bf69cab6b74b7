"""Packed rows as tensors. The only thing a loss ever sees, and the only torch in ptf.data.

The one idea: everything is aligned with *targets*. Position t of a row predicts `targets[t]`, counts `weights[t]`, and carries the streams
of the token it predicts; the shift by one happens here and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ptf.data.sample import Atom, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows: documents lie end to end from the left; what is left of a row is padding."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64, next token inside the same document
    positions: Tensor  # [B, T] int64, restart with every document; at n > 0: it goes on from the first n tokens of the last one that began at 0
    segments: Tensor  # [B, T] int64, document number in the batch, -1 is padding
    weights: Tensor  # [B, T] float32, loss weight of each target
    atoms: Tensor  # [documents] int64, which atom a document belongs to
    lengths: tuple[int, ...]  # per document, on the host
    begins: tuple[int, ...]  # per document, the position of its first token
    sources: tuple[str, ...]  # per document
    streams: Mapping[str, Tensor] = field(default_factory=dict)  # [B, T] or [B, T, k], aligned with targets

    @staticmethod
    def of(rows: Sequence[Sequence[Atom]], width: int) -> "Batch":
        """Lay out rows of atoms, each at most `width` tokens in all."""
        return laid_out(rows, width, max(1, len(rows)))[0]

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
        return Batch(
            move(self.tokens), move(self.targets), move(self.positions), move(self.segments), move(self.weights),
            move(self.atoms), self.lengths, self.begins, self.sources, {k: move(v) for k, v in self.streams.items()},
        )  # fmt: skip

    def per_document(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sums over documents, weighted by `weights`, by default the batch's: [B, T] → [documents]."""
        flat = (values * (self.weights if weights is None else weights)).reshape(-1)
        index = self.segments.reshape(-1)
        out = torch.zeros(len(self.lengths) + 1, dtype=flat.dtype, device=flat.device)
        return out.index_add(0, index + 1, flat)[1:]  # padding (-1) falls into slot 0


def laid_out(rows: Sequence[Sequence[Atom]], width: int, micro_rows: int) -> list[Batch]:
    """Rows of atoms, each at most `width` tokens in all, as batches of `micro_rows` (the last one may have fewer), of which each is a part of the same
    arrays: numpy's calls cost more than a short document's copies, so all rows are laid out together."""
    samples = [sample for row in rows for members in row for sample in members]
    owned = [len(members) for row in rows for members in row]  # samples of each atom
    behind = np.cumsum([0, *(sum(map(len, row)) for row in rows)])  # samples before each row, and all
    atoms_behind = np.cumsum([0, *map(len, rows)])
    firsts = [*range(0, len(rows), micro_rows)] or [0]  # row of each batch
    counts, begun = [len(sample.tokens) for sample in samples], [sample.begins for sample in samples]
    lengths = np.array(counts, np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    filled = np.diff(ends[behind])
    assert (filled <= width).all(), f"row {int(filled.argmax())} holds {int(filled.max(initial=0))} tokens, more than {width}"
    row_of = np.repeat(np.arange(len(rows)), np.diff(behind))
    starts = ends[:-1] - ends[behind[row_of]] + row_of * width  # in the rows one after the other
    numbers = np.arange(len(samples)) - behind[np.array(firsts)[row_of // micro_rows]]

    room, pads = behind[1:] + np.arange(len(rows)), width - filled  # what is left of a row lies behind its documents: a piece like those
    ids = _flat([sample.tokens for sample in samples], behind, pads, np.int32)
    loss = _flat([sample.weights for sample in samples], behind, pads, np.float32)
    pieces = _with(lengths, room, pads)
    segments = np.repeat(_with(numbers, room, -1), pieces)
    positions = np.arange(len(rows) * width)
    positions -= np.repeat(_with(starts - np.array(begun, np.int64), room, 0), pieces)
    tokens, targets, weights = ids.astype(np.int64), np.empty(len(ids), np.int64), np.empty(len(ids), np.float32)
    targets[:-1], weights[:-1] = ids[1:], loss[1:]
    last = starts + lengths - 1  # nothing follows the last token of a document
    targets[last], weights[last] = 0, 0.0
    made = {"tokens": tokens, "targets": targets, "positions": positions, "segments": segments, "weights": weights}
    shaped = {name: values.reshape(len(rows), width) for name, values in made.items()}
    for row in np.flatnonzero(pads).tolist():
        for name in ("targets", "positions", "weights"):
            shaped[name][row, filled[row] :] = 0
    streams = _streams(samples, starts.tolist(), (len(rows), width)) if any(sample.streams for sample in samples) else {}
    owners = np.repeat(np.arange(len(owned)), owned)
    sources = [sample.source for sample in samples]
    batches = []
    for first in firsts:
        end = min(first + micro_rows, len(rows))
        start, stop = int(behind[first]), int(behind[end])
        part = {name: torch.from_numpy(values[first:end]) for name, values in shaped.items()}
        batches.append(
            Batch(
                **part, atoms=torch.from_numpy(owners[start:stop] - atoms_behind[first]), lengths=tuple(counts[start:stop]),
                begins=tuple(begun[start:stop]), sources=tuple(sources[start:stop]),
                streams={name: torch.from_numpy(values[first:end]) for name, values in streams.items()},
            )
        )  # fmt: skip
    return batches


def _flat(pieces: list[np.ndarray], behind: np.ndarray, pads: np.ndarray, kind: type) -> np.ndarray:
    """The pieces of all rows one after the other, with zeros where a row has nothing more. [rows * width]"""
    zeros, cuts = np.zeros(pads.max(initial=0), kind), behind.tolist()
    padded = [zeros[:0]]
    for row, n in enumerate(pads.tolist()):
        padded += pieces[cuts[row] : cuts[row + 1]]
        if n:
            padded.append(zeros[:n])
    return np.concatenate(padded)


def _with(values: np.ndarray, at: np.ndarray, more: np.ndarray | int) -> np.ndarray:
    """The values with others among them, which then stand at `at`."""
    found = np.empty(len(values) + len(at), np.int64)
    others = np.ones(len(found), bool)
    others[at] = False
    found[at], found[others] = more, values
    return found


def _streams(samples: Sequence[Sample], starts: Sequence[int], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Each as long as the rows, with zeros for samples that do not carry it."""
    found: dict[str, np.ndarray] = {}
    for at, sample in zip(starts, samples, strict=True):
        for name, values in sample.streams.items():
            if name not in found:
                found[name] = np.zeros((shape[0] * shape[1], *values.shape[1:]), values.dtype)
            found[name][at : at + len(values) - 1] = values[1:]
    return {name: values.reshape(*shape, *values.shape[1:]) for name, values in found.items()}
