"""Activation checkpointing: the backward recomputes what a block computed, instead of saving it in the forward pass.

`block` saves only a block's input. `selective` (Korthikanti et al., 2022) saves the outputs of matrix products and
attention, which are slow to compute, and recomputes the rest: norms, rotations, activation functions, casts.
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
SAVED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of matrix products and attention; recompute the others."""
    # a product of one row is cheap, and matmul reshapes it in place, which a saved tensor must not be
    row = op is aten.mm.default and len(args[0]) == 1
    return CheckpointPolicy.MUST_SAVE if op in SAVED and not row else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _without_routing(block: nn.Module, inner: Any) -> Iterator[None]:
    """Drop the routing that the recomputation leaves behind: it would keep all of its activations alive."""
    try:
        with inner:
            yield
    finally:
        moe: Any = getattr(block, "moe", None)
        if moe is not None:
            moe.routing = None


def _contexts(block: nn.Module, selective: bool) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of the recomputation."""
    first, second = contextlib.nullcontext(), contextlib.nullcontext()
    if selective:
        first, second = create_selective_checkpoint_contexts(_policy)
    return first, _without_routing(block, second)


def recompute(block: nn.Module, mode: Recompute) -> None:
    """Wrap a block's forward in activation checkpointing of this mode."""
    if mode == "none":
        return
    own = block.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        return checkpoint(
            own,
            *inputs,
            **named,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, block, mode == "selective"),
        )

    block.forward = forward
