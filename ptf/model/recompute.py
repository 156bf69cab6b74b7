"""Activation checkpointing: the backward recomputes what a block computed, instead of saving it in the forward pass.

`block` saves only a block's input; `offload` saves it in host memory. `selective` (Korthikanti et al., 2022) saves the
outputs of matrix products and attention, which are slow to compute, and recomputes the rest: norms, rotations,
activation functions, casts.

torch's policy sees the operators that are called, which a compiled attention hides. So attention is kept from outside:
what its backward needs (queries, keys, values, output) stays saved, and the recomputation is given its output.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ptf.model.kernels.matrix_product import OPERATOR

Recompute = Literal["none", "block", "offload", "selective"]
aten = torch.ops.aten
SAVED = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default}
SAVED |= set() if OPERATOR is None else {OPERATOR.default}


class _Kept:
    """An `Attend` that runs once: in the recomputation it returns the outputs of the forward pass.

    What ranks exchange after attention is exchanged again: attention keeps its output, so it would be kept twice.
    """

    def __init__(self, attend: Any) -> None:
        self.attend, self.outputs = attend, deque[Tensor]()
        self.run = getattr(attend, "of_heads", attend)
        self.exchanged: Callable[[Tensor], Tensor] = getattr(attend, "to_tokens", lambda out: out)
        self.inside = self.again = False  # attention runs; the block is recomputed

    def __call__(self, *inputs: Any) -> Tensor:
        if self.again:
            return self.exchanged(self.outputs.popleft())
        self.inside = True
        with saved_tensors_hooks(lambda t: t, lambda t: t):  # in place of the hooks that drop what is saved
            out = self.run(*inputs)
        self.inside = False
        if torch.is_grad_enabled():
            self.outputs.append(out.detach().requires_grad_(out.requires_grad))
        return self.exchanged(out)

    def delta(self, *inputs: Any) -> Tensor:
        """Run linear attention, in the forward pass and again in the recomputation: what is inside is not saved."""
        self.inside = True
        out = self.attend.delta(*inputs)
        self.inside = False
        return out

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Save the outputs of matrix products, outside attention; recompute the others."""
        # a product of one row is cheap, and matmul reshapes it in place, which a saved tensor must not be
        row = op is aten.mm.default and len(args[0]) == 1
        saved = op in SAVED and not row and not self.inside
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _recomputation(block: nn.Module, kept: _Kept | None, inner: Any) -> Iterator[None]:
    """Compute a block again inside the `with` block; the routing that it leaves behind is dropped, because it would
    keep all of its activations alive."""
    if kept is not None:
        kept.again = True
    try:
        with inner:
            yield
    finally:
        moe: Any = getattr(block, "moe", None)
        if moe is not None:
            moe.routing = None


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which activations are copied to the host, beside the computation."""
    return torch.cuda.Stream(device)


def to_host(x: Tensor) -> Callable[[], Tensor]:
    """Copy a tensor to host memory; return a function that copies it back to its device.

    From a GPU it is copied to page-locked memory, while the GPU computes on.
    """
    device = x.device
    if device.type != "cuda":
        host = x.detach().clone()
        return host.clone
    stream = _copies(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        pinned.copy_(x.detach(), non_blocking=True)
        copied = stream.record_event()
    x.record_stream(stream)  # its memory is not used again before the copy has ended

    def back() -> Tensor:
        torch.cuda.current_stream(device).wait_event(copied)
        return pinned.to(device, non_blocking=True)

    return back


def _in_host_memory(x: Tensor) -> saved_tensors_hooks:
    """Return a context in which `x`, if autograd saves it, is saved in host memory."""
    key = x.untyped_storage()._cdata, x.shape

    def pack(t: Tensor) -> Any:
        return to_host(t) if (t.untyped_storage()._cdata, t.shape) == key else t

    return saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved())


def _contexts(block: nn.Module, kept: _Kept | None) -> tuple[Any, Any]:
    first, second = contextlib.nullcontext(), contextlib.nullcontext()
    if kept is not None:
        first, second = create_selective_checkpoint_contexts(kept.policy)
    return first, _recomputation(block, kept, second)


def recompute(block: nn.Module, mode: Recompute) -> None:
    """Wrap the forward of a block, whose third argument is its `Attend`, in activation checkpointing of this mode.

    It is not `none`.
    """
    own = block.forward

    def forward(x: Tensor, rope: Any, attend: Any, *inputs: Any) -> Any:
        kept = _Kept(attend) if mode == "selective" else None
        with _in_host_memory(x) if mode == "offload" else contextlib.nullcontext():
            return checkpoint(
                own,
                x,
                rope,
                attend if kept is None else kept,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=partial(_contexts, block, kept),
            )

    block.forward = forward
