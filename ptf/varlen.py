"""How documents of different lengths lie in a batch, as the kernels of variable-length attention are told it."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Varlen(NamedTuple):
    """Arguments of attention over documents of different lengths; padding counts as one more document.

    The names are those of `flash_attn_varlen_func`. A batch's own are `Batch.varlen`.
    """

    cu_seqlens: "Tensor"  # [documents + 1] int32: where each document begins in [B · T], and B · T
    max_seqlen: int  # length of the longest
    shares_prefix: bool  # whether a document's first tokens are those of an earlier one, and are omitted
