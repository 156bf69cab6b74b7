"""Packed rows as tensors. The only thing a loss ever sees, and the only torch in ptf.data.

The one idea: everything is aligned with *targets*. Position t of a row predicts `targets[t]`, counts `weights[t]`, and carries the streams
of the token it predicts; the shift by one happens here and nowhere else.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ptf.data.documents import Documents
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
        return laid_out(Documents.of(rows), width, max(1, len(rows)))[0]

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


class Memory:
    """Arrays that are used again once nobody holds what was made of them: to touch fresh memory first costs more than to lay out a row there."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def block(self, n: int) -> np.ndarray:
        """Of n bytes, with whatever is in them. Views of it hold it."""
        self._blocks = [block for block in self._blocks if block.nbytes == n]
        for i in range(len(self._blocks)):
            if sys.getrefcount(self._blocks[i]) == HELD_HERE:
                return self._blocks[i]
        self._blocks.append(np.empty(n, np.uint8))
        return self._blocks[-1]


HELD_HERE = 2  # the list, and the argument of getrefcount


def laid_out(documents: Documents, width: int, micro_rows: int, memory: Memory | None = None) -> list[Batch]:
    """Rows of at most `width` tokens as batches of `micro_rows` (the last one may have fewer), of which each is a part of the same arrays: numpy's calls
    cost more than a short document's copies, so all rows are laid out together. `memory` is where."""
    rows = len(documents.rows)
    counts = [*map(len, documents.tokens)]
    lengths, behind = np.array(counts, np.int64), np.cumsum([0, *documents.rows])  # documents before each row, and all
    ends = np.concatenate([[0], np.cumsum(lengths)])
    filled = np.diff(ends[behind])
    assert (filled <= width).all(), f"row {int(filled.argmax())} holds {int(filled.max(initial=0))} tokens, more than {width}"
    starts = ends[:-1] + np.repeat(np.arange(rows) * width - ends[behind[:-1]], documents.rows)  # in the rows one after the other
    cuts, pads = behind.tolist(), (width - filled).tolist()

    made = _arrays(rows, width, memory or Memory())
    np.concatenate(_padded(documents.tokens, cuts, pads, np.int32), out=made["tokens"].reshape(-1), casting="same_kind")
    own = [documents.weights[start:end] for start, end in pairwise(ends[behind].tolist())]
    np.concatenate(_padded(own, range(rows + 1), pads, np.float32), out=made["own"].reshape(-1), casting="same_kind")
    made["targets"].reshape(-1)[:-1] = made["tokens"].reshape(-1)[1:]
    last = starts + lengths - 1  # nothing follows the last token of a document, nor that of what is left of a row
    made["targets"].reshape(-1)[last], made["weights"].reshape(-1)[last] = 0, 0.0
    made["targets"][:, -1], made["weights"][:, -1] = 0, 0.0

    streams = _streams(documents.streams, starts.tolist(), (rows, width)) if documents.streams else {}
    atoms_behind, owners = np.cumsum([0, *documents.atoms]), np.repeat(np.arange(len(documents.owned)), documents.owned)
    firsts = range(0, max(1, rows), micro_rows)  # row of each batch
    in_batches = np.diff(behind[[*firsts, rows]])  # documents of each
    numbers = np.arange(len(counts)) - np.repeat(behind[[*firsts]], in_batches)
    offsets = starts - np.array(documents.begins, np.int64) - np.repeat(np.array(firsts) * width, in_batches)
    room = behind[1:] + np.arange(rows)  # what is left of a row lies behind its documents: a piece like those
    pieces, numbers, offsets = _with(lengths, room, width - filled), _with(numbers, room, -1), _with(offsets, room, 0)
    ramp = np.arange(micro_rows * width)
    batches = []
    for first in firsts:
        end = min(first + micro_rows, rows)
        start, stop = cuts[first], cuts[end]
        piece = slice(start + first, stop + end)
        made["segments"][first:end] = np.repeat(numbers[piece], pieces[piece]).reshape(-1, width)
        begin = np.repeat(offsets[piece], pieces[piece])
        np.subtract(ramp[: len(begin)], begin, out=made["positions"][first:end].reshape(-1))
        for row in range(first, end):
            if pads[row]:
                made["positions"][row, width - pads[row] :] = 0
        part = {name: torch.from_numpy(values[first:end]) for name, values in made.items() if name != "own"}
        batches.append(
            Batch(
                **part, atoms=torch.from_numpy(owners[start:stop] - atoms_behind[first]), lengths=tuple(counts[start:stop]),
                begins=tuple(documents.begins[start:stop]), sources=tuple(documents.sources[start:stop]),
                streams={name: torch.from_numpy(values[first:end]) for name, values in streams.items()},
            )
        )  # fmt: skip
    return batches


def _arrays(rows: int, width: int, memory: Memory) -> dict[str, np.ndarray]:
    """What a batch holds, not filled. `own` are the weights of the tokens themselves: `weights` is the same memory, one token on."""
    n = rows * width
    block = memory.block(4 * (8 * n) + 4 * (n + 1))
    found = {name: block[i * 8 * n : (i + 1) * 8 * n].view(np.int64) for i, name in enumerate(("tokens", "targets", "positions", "segments"))}
    loss = block[4 * (8 * n) :].view(np.float32)
    return {name: values.reshape(rows, width) for name, values in {**found, "own": loss[:n], "weights": loss[1:]}.items()}


def _padded(pieces: Sequence[np.ndarray], cuts: Sequence[int], pads: list[int], kind: type) -> list[np.ndarray]:
    """The pieces of all rows one after the other, with zeros where a row has nothing more."""
    zeros = np.zeros(max(pads, default=0), kind)
    padded = [zeros[:0]]
    for row, n in enumerate(pads):
        padded += pieces[cuts[row] : cuts[row + 1]]
        if n:
            padded.append(zeros[:n])
    return padded


def _with(values: np.ndarray, at: np.ndarray, more: np.ndarray | int) -> np.ndarray:
    """The values with others among them, which then stand at `at`."""
    found = np.empty(len(values) + len(at), np.int64)
    others = np.ones(len(found), bool)
    others[at] = False
    found[at], found[others] = more, values
    return found


def _streams(carried: Sequence[Mapping[str, np.ndarray]], starts: Sequence[int], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Each as long as the rows, with zeros for documents that do not carry it."""
    found: dict[str, np.ndarray] = {}
    for at, streams in zip(starts, carried, strict=True):
        for name, values in streams.items():
            if name not in found:
                found[name] = np.zeros((shape[0] * shape[1], *values.shape[1:]), values.dtype)
            found[name][at : at + len(values) - 1] = values[1:]
    return {name: values.reshape(*shape, *values.shape[1:]) for name, values in found.items()}
