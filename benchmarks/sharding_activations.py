"""What a layer keeps for its backward pass on a rank that divides sequences, beside one rank's: the part `activations`
of sharding.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pages import Row

SHAPE, TOKENS, SLACK = "Qwen3-8B", 4096, 0.02
ABOUT = f"""\
The bytes that a layer of {SHAPE} keeps for its backward pass in a sequence of {TOKENS:,} tokens in bf16, as a share of
those of one rank: counted by storage on fake tensors, with attention that keeps what a fused kernel keeps. Where there
are fewer key-value heads (2) than ranks (4), each rank has one, so keys and values are ranks / heads times as large.
"""


def activations(steps: int, scratch: Path) -> Iterator[Row]:
    """Every recomputation, on 2 and on 4 ranks."""
    from ptf.model.recompute import Recompute
    from tests.model.activations import kept

    for kv in (8, 2):
        for mode in get_args(Recompute):
            if mode != "offload":  # keeps nothing on the device
                alone = kept(SHAPE, TOKENS, 1, mode, kv)
                for ranks in (2, 4):
                    share = kept(SHAPE, TOKENS, ranks, mode, kv) / alone
                    found = {"case": f"{mode}, {kv} key-value heads", "mesh": f"context {ranks}", "share": share}
                    yield found | {"bytes_a_token": alone / TOKENS, "bound": 1 / ranks + SLACK}
