"""Packed rows as tensors. The only thing a loss ever sees, and the only torch in ptf.data.

The one idea: everything is aligned with *targets*. Position t of a row predicts `targets[t]`, counts `weights[t]`, and carries the streams
of the token it predicts; the shift by one happens here and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ptf.data.sample import Atom


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
        shape = (len(rows), width)
        tokens, targets, positions = (np.zeros(shape, np.int64) for _ in range(3))
        segments = np.full(shape, -1, np.int64)
        weights = np.zeros(shape, np.float32)
        streams: dict[str, np.ndarray] = {}
        samples = [[sample for members in row for sample in members] for row in rows]
        counts = [len(sample.tokens) for row in samples for sample in row]
        ramp, first = np.arange(width), 0
        for r, row in enumerate(samples):  # a row at a time: numpy's calls cost more than a short document's copies
            if not row:
                continue
            lengths = np.array(counts[first : first + len(row)])
            ends = np.cumsum(lengths)
            n = int(ends[-1])
            assert n <= width, f"row {r} holds {n} tokens, more than {width}"
            tokens[r, :n] = ids = np.concatenate([sample.tokens for sample in row])
            targets[r, : n - 1] = ids[1:]
            weights[r, : n - 1] = np.concatenate([sample.weights for sample in row])[1:]
            targets[r, ends - 1], weights[r, ends - 1] = 0, 0.0  # nothing follows the last token of a document
            begins = np.array([sample.begins for sample in row])
            np.subtract(ramp[:n], np.repeat(ends - lengths - begins, lengths), out=positions[r, :n])
            segments[r, :n] = np.repeat(np.arange(first, first + len(row)), lengths)
            for at, sample in zip((ends - lengths).tolist(), row, strict=True):
                for name, values in sample.streams.items():
                    if name not in streams:
                        streams[name] = np.zeros(shape + values.shape[1:], values.dtype)
                    streams[name][r, at : at + len(values) - 1] = values[1:]
            first += len(row)
        owners = [atom for atom, members in enumerate(members for row in rows for members in row) for _ in members]
        sources = tuple(sample.source for row in samples for sample in row)
        starts = tuple(sample.begins for row in samples for sample in row)
        as_tensor = torch.from_numpy
        return Batch(
            as_tensor(tokens), as_tensor(targets), as_tensor(positions), as_tensor(segments), as_tensor(weights),
            torch.tensor(owners, dtype=torch.int64), tuple(counts), starts, sources, {k: as_tensor(v) for k, v in streams.items()},
        )  # fmt: skip

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
