"""Block masks of packed documents: equal to those made from every pair of tokens, without a tensor of all pairs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptf.model.kernels.document_mask import BLOCK, DocumentMasks, MaskFunction

TABLES = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]
Piece = tuple[int, float | None]  # tokens; the share of the last whole document that it continues, None for a whole one


def row_of(pieces: list[Piece], width: int) -> tuple[list[int], list[int]]:
    """The segments and positions of a row, cut at its width, the rest of which is padding."""
    segments: list[int] = []
    positions: list[int] = []
    whole = 0
    for number, (length, share) in enumerate(pieces):
        begins = 0 if share is None else int(share * whole)
        if begins == 0:
            whole = length
        segments += [number] * length
        positions += range(begins, begins + length)
    more = max(0, width - len(segments))
    return (segments + [-1] * more)[:width], (positions + [0] * more)[:width]


def masks_of(rows: list[list[Piece]], width: int) -> DocumentMasks:
    made = [row_of(row, width) for row in rows]
    return DocumentMasks(torch.tensor([m[0] for m in made]), torch.tensor([m[1] for m in made]))


def attends(masks: DocumentMasks, window: int | None) -> MaskFunction:
    """Whether a query attends to a key, by the segments and positions of both."""
    segments, positions = masks.segments, masks.positions
    begins = [row.tolist().index(s) for row, own in zip(segments, segments.tolist(), strict=True) for s in own]
    prefix_length = positions.gather(1, torch.tensor(begins).view(segments.shape))
    whole = [[0] * segments.shape[1] for _ in segments]  # the segment whose first tokens a token's document continues
    for row, (own, at) in enumerate(zip(segments.tolist(), positions.tolist(), strict=True)):
        last = own[0]
        for i in range(len(own)):
            begin = i == 0 or own[i] != own[i - 1]
            last = own[i] if begin and at[i] == 0 else last
            whole[row][i] = last
    wholes = torch.tensor(whole)

    def inside(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        before = (wholes[b, q] == segments[b, k]) & (positions[b, k] < prefix_length[b, q])
        near = positions[b, q] - positions[b, k] < (window or len(positions[0]) * 2)
        return (q >= k) & ((segments[b, q] == segments[b, k]) | before) & near

    return inside


def of_all_pairs(masks: DocumentMasks, window: int | None) -> BlockMask:
    rows, width = masks.segments.shape
    return create_block_mask(attends(masks, window), rows, None, width, width, device="cpu")


def pairs(function: MaskFunction, masks: DocumentMasks) -> Tensor:
    """What a mask function says of every pair, [B, T, T]."""
    rows, width = masks.segments.shape
    at = torch.arange(width)
    return function(torch.arange(rows)[:, None, None], torch.tensor(0), at[:, None], at[None])


def differ(mine: BlockMask, theirs: BlockMask) -> list[str]:
    assert mine.seq_lengths == theirs.seq_lengths
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in TABLES}
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs.values())
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


lengths = st.one_of(st.integers(1, 40), st.integers(100, 700), st.sampled_from([127, 128, 129, 256, 384]))
pieces = st.tuples(lengths, st.one_of(st.none(), st.none(), st.floats(0, 1), st.just(1.0)))
windows = st.one_of(st.none(), st.integers(1, 1400), st.sampled_from([1, 127, 128, 129, 256]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(pieces, min_size=1, max_size=9), min_size=1, max_size=3),
    width=st.one_of(st.integers(1, 1400), st.sampled_from([128, 256, 1024])),
    window=windows,
)
def test_tables_are_those_of_all_pairs(rows: list[list[Piece]], width: int, window: int | None) -> None:
    masks = masks_of(rows, width)
    assert differ(masks.mask(window), of_all_pairs(masks, window)) == []
    assert torch.equal(pairs(masks.function(window), masks), pairs(attends(masks, window), masks))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("whole_start", lambda masks: masks.start),  # the prefix is not seen
        ("whole_end", lambda masks: masks.whole_start),
        ("start", lambda masks: torch.zeros_like(masks.start)),  # one document a row
    ],
)
def test_what_is_left_out_of_the_tables_is_noticed(name: str, fault: Callable[[DocumentMasks], Tensor]) -> None:
    masks = masks_of([[(300, None), (200, 0.9), (200, 0.9)]], 1024)
    expected = of_all_pairs(masks, None)
    assert differ(masks.mask(None), expected) == []
    every = pairs(attends(masks, None), masks)
    setattr(masks, name, fault(masks))
    assert differ(masks.mask(None), expected)
    assert not torch.equal(pairs(masks.function(None), masks), every)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        found = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and not t._is_view()]
        self.elements = max([self.elements, *found])
        return out


def test_no_tensor_has_an_element_for_each_pair() -> None:
    width = 8192
    bound = 8 * width + 4 * (width // BLOCK) ** 2
    for window in (None, 1000):
        with Largest() as mine:
            masks = masks_of([[(3000, None), (1000, 0.5), (2000, None), (1500, None)]], width)
            masks.mask(window)
        assert 0 < mine.elements <= bound
    with Largest() as theirs:
        of_all_pairs(masks, None)
    assert theirs.elements >= width**2 > bound
