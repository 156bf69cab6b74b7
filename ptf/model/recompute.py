"""Activation checkpointing: what a block computes is made again in the backward, instead of being kept since the forward.

`block` keeps a block's input alone. `selective` (Korthikanti et al., 2022) keeps what matrix products and attention gave, which is slow to make
again, and makes the rest again: norms, rotations, activation functions, casts.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "block", "selective"]
aten, c10d = torch.ops.aten, torch.ops.c10d
KEPT = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}  # fmt: skip


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    row = op is aten.mm.default and len(args[0]) == 1  # cheap, and matmul reshapes it in place, which what is kept must not be
    return CheckpointPolicy.MUST_SAVE if op in KEPT and not row else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _forgetting(block: nn.Module, inner: Any) -> Iterator[None]:
    """The routing that a second forward pass leaves behind would keep all of its activations."""
    try:
        with inner:
            yield
    finally:
        moe: Any = getattr(block, "moe", None)
        if moe is not None:
            moe.routing = None


def _contexts(block: nn.Module, selective: bool) -> tuple[Any, Any]:
    first, second = create_selective_checkpoint_contexts(_policy) if selective else (contextlib.nullcontext(), contextlib.nullcontext())
    return first, _forgetting(block, second)


def recompute(block: nn.Module, how: Recompute) -> None:
    """Make a block forget what it computed until its backward."""
    if how == "none":
        return
    own = block.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        return checkpoint(own, *inputs, **named, use_reentrant=False, preserve_rng_state=False, context_fn=partial(_contexts, block, how == "selective"))

    block.forward = forward
