"""How our tensors and Hugging Face's correspond: data that a family's file declares once, used for reading and for
writing.

A `TensorMapping` says which slices of their tensors make up a slice of ours, so that a rank reads from a checkpoint
only what it owns. In a name, `{i}` runs over the layers and `{e}` over the experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

Slices = tuple[slice, ...]
Read = Callable[[str, Slices], Tensor]  # a slice of the tensor of that name in a checkpoint


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """The correspondence of some of our tensors to one or some of Hugging Face's: here, of one tensor under two names
    (`rename`)."""

    ours: tuple[str, ...]
    other: str

    def theirs(self) -> tuple[str, ...]:
        """Return their names."""
        return (self.other,)

    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        """Return the shape of each of their tensors, given the shape of ours."""
        return tuple(ours)

    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        """Return the slice `part` of `ours[which]`, read from their tensors."""
        return read(self.other, part)

    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return their tensors, computed from whole tensors of ours."""
        return tensors


def rename(ours: str, theirs: str) -> TensorMapping:
    """Return the mapping of one tensor under two names."""
    return TensorMapping((ours,), theirs)


@dataclass(frozen=True, slots=True)
class PaddedRows(TensorMapping):
    """Their tensor is the first `count` rows of ours; our other rows are padding, and zero."""

    count: int

    @override
    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        return (self.count, *ours[1:])

    @override
    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        first, last = (min(row, self.count) for row in (part[0].start, part[0].stop))
        whole = torch.zeros([s.stop - s.start for s in part])
        if first == last:
            return whole
        real = read(self.other, (slice(first, last), *part[1:]))
        if last == part[0].stop:
            return real
        whole = whole.to(real.dtype)
        whole[: last - first] = real
        return whole

    @override
    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0][: self.count]]


@dataclass(frozen=True, slots=True)
class Transpose(TensorMapping):
    """The last two dimensions of their tensor are swapped in ours."""

    @override
    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        return (*ours[:-2], ours[-1], ours[-2])

    @override
    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        return read(self.other, (*part[:-2], part[-1], part[-2])).transpose(-2, -1)

    @override
    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0].transpose(-2, -1)]


@dataclass(frozen=True, slots=True)
class Bits(TensorMapping):
    """Ours are the bits of their values in fp32, as integers: no cast of a model's weights changes them."""

    @override
    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        return read(self.other, part).float().contiguous().view(torch.int32)

    @override
    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0].view(torch.float32)]


@dataclass(frozen=True, slots=True)
class Stack(TensorMapping):
    """One tensor of ours stacks one of theirs for each expert."""

    experts: int = 0  # `sized` says how many

    def sized(self, shapes: Mapping[str, Sequence[int]]) -> Self:
        """Return the mapping of a model in which our tensors have these shapes."""
        return replace(self, experts=shapes[self.ours[0]][0])

    @override
    def theirs(self) -> tuple[str, ...]:
        assert self.experts, f"{self.other} is of a model whose experts were not counted (`sized`)"
        return tuple(self.other.replace("{e}", str(e)) for e in range(self.experts))

    @override
    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        return tuple(ours[1:])

    @override
    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        return torch.stack([read(name, part[1:]) for name in self.theirs()[part[0]]])

    @override
    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors[0].unbind(0)


@dataclass(frozen=True, slots=True)
class Concatenate(TensorMapping):
    """Their tensor has the rows of several of ours, one after the other; with `dim` 1, in each expert."""

    dim: int = 0  # that of the rows
    rows: tuple[int, ...] = ()  # of each of ours; `sized` says how many

    def sized(self, shapes: Mapping[str, Sequence[int]]) -> Self:
        """Return the mapping of a model in which our tensors have these shapes."""
        return replace(self, rows=tuple(shapes[name][self.dim] for name in self.ours))

    @override
    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        return (*ours[: self.dim], sum(self.rows), *ours[self.dim + 1 :])

    @override
    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        before, rows = sum(self.rows[:which]), part[self.dim]
        return read(
            self.other, (*part[: self.dim], slice(before + rows.start, before + rows.stop), *part[self.dim + 1 :])
        )

    @override
    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(tuple(tensors), self.dim)]


@dataclass(frozen=True, slots=True)
class Interleave(TensorMapping):
    """Two tensors of ours alternate along the last dimension of one of theirs.

    The last two dimensions of theirs are swapped in ours if it is `transposed`.
    """

    transposed: bool

    @override
    def shape(self, ours: torch.Size) -> tuple[int, ...]:
        return (*ours[:-2], ours[-1], 2 * ours[-2]) if self.transposed else (*ours[:-1], 2 * ours[-1])

    @override
    def read(self, which: int, part: Slices, read: Read) -> Tensor:
        if self.transposed:
            part = (*part[:-2], part[-1], part[-2])
        one = read(self.other, (*part[:-1], slice(2 * part[-1].start, 2 * part[-1].stop)))[..., which::2]
        return one.transpose(-2, -1) if self.transposed else one

    @override
    def write(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.transposed:
            tensors = [t.transpose(-2, -1) for t in tensors]
        return [torch.stack(tuple(tensors), -1).flatten(-2)]
