"""The block masks of packed documents: which blocks of keys a block of queries attends to, for FlexAttention.

`create_block_mask` evaluates a mask for every pair of tokens: 7 to 10 bytes · T² a sequence. Here each query's keys are
two intervals: those of its own document up to itself, and those of the prefix that the document continues. The blocks
that an interval touches or covers are an interval of blocks, so a block of queries is counted by sums over the ends of
intervals: tensors of T elements and tables of (T / 128)².
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys of a block, as FlexAttention chooses them
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of (sequence, head, query, key)


class DocumentMasks:
    """The masks of sequences of packed documents; `segments` and `positions` are [B, T].

    The tokens of a document, which alone have its segment, are next to each other, with consecutive positions. Those of
    padding have equal positions.
    """

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        self.segments, self.positions = segments, positions
        self.at = at = torch.arange(segments.shape[1], device=segments.device)
        starts = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)

        def last(starts: Tensor) -> Tensor:
            return torch.where(starts, at, 0).cummax(1).values

        self.start = last(starts)  # for each token, the first token of its document
        self.prefix_length = positions.gather(
            1, self.start
        )  # the position at which its document begins, after a shared prefix
        # the first token of the document whose first `prefix_length` tokens are its document's prefix
        self.whole_start = last(starts & (positions == 0))
        after = F.pad(torch.where(starts, at, len(at))[:, 1:], (0, 1), value=len(at))
        self.whole_end = after.flip(1).cummin(1).values.flip(1).gather(1, self.whole_start)

    def function(self, window: int | None) -> MaskFunction:
        """Return the function that says whether a query attends to a key, in a window (None: unlimited).

        The kernel calls it for every pair of a block that is not whole: it reads three numbers of 32 bits a query, and
        nothing of a key.
        """
        (first, _), (prefix, prefix_end) = [[t.int() for t in ends] for ends in self.intervals(window)]

        def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (k >= first[b, q]) | (k >= prefix[b, q]) & (k < prefix_end[b, q])

        return attends

    def intervals(self, window: int | None) -> list[tuple[Tensor, Tensor]]:
        """Return the keys of each query as two disjoint intervals, (first, behind the last) [B, T] each.

        Where they would meet, the first one is both.
        """
        first, prefix = self.start, self.whole_start
        at_prefix = self.positions.gather(1, prefix)
        if window is not None:
            least = self.positions - window + 1  # the first position in the window
            first = first + (least - self.prefix_length).clamp(min=0)
            prefix = prefix + (least - at_prefix).clamp(min=0)
        prefix_end = torch.minimum(self.whole_start + (self.prefix_length - at_prefix).clamp(min=0), self.whole_end)
        meet = (prefix_end == first) & (prefix < prefix_end)
        return [
            (torch.where(meet, prefix, first), (self.at + 1).expand_as(first)),
            (prefix, torch.where(meet, prefix, prefix_end)),
        ]

    def mask(self, window: int | None) -> "BlockMask":
        """Return the block mask of a window, equal to what `create_block_mask` makes of its function."""
        from torch.nn.attention.flex_attention import BlockMask

        intervals = self.intervals(window)
        touched = self._count([(first // BLOCK, (end + BLOCK - 1) // BLOCK, first < end) for first, end in intervals])
        inner = [((first + BLOCK - 1) // BLOCK, end // BLOCK) for first, end in intervals]
        # covered by each of its queries, all of which exist
        full = self._count([(first, end, first < end) for first, end in inner]) == BLOCK
        length = len(self.at)
        return BlockMask.from_kv_blocks(
            *_in_order((touched > 0) & ~full),
            *_in_order(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.function(window),
            seq_lengths=(length, length),
        )

    def _count(self, intervals: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Return how many queries' intervals (first, end, whether it counts) contain each block, [B, blocks, blocks].

        It is the running sum of a table that has 1 where an interval begins and -1 where it ends.
        """
        sequences, blocks = len(self.segments), -(-len(self.at) // BLOCK)
        block_row = torch.arange(sequences, device=self.at.device)[:, None] * blocks + self.at // BLOCK
        changes = torch.zeros(sequences * blocks * (blocks + 1), dtype=torch.int32, device=self.at.device)
        for first, end, counts in intervals:
            ones = counts.int().flatten()
            for block, change in ((first, ones), (end, -ones)):
                changes.index_add_(0, (block_row * (blocks + 1) + block).flatten(), change)
        return changes.view(sequences, blocks, blocks + 1).cumsum(-1, dtype=torch.int32)[..., :-1]


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row are true, [B, 1, blocks], and all numbers of blocks, those first."""
    table = blocks[:, None].int()  # [B, 1, blocks, blocks]
    return table.sum(-1, dtype=torch.int32), table.argsort(dim=-1, descending=True, stable=True).int()
