"""Kernels of other packages that training uses on a GPU in place of PyTorch's functions, where they are installed:
attention by flash_attn 4 or 2, gates by liger_kernel, the rule of linear attention by fla (flash-linear-attention).

They compute what PyTorch's functions do, up to rounding (tests/gpu/test_fused.py compares them). Left out: Liger's
norms, which are slower than compiled ones (docs/gpu_status.md); its rotary embedding, which writes into queries and
keys that the backward pass may have saved; its losses, which know no weights of tokens. ptf's native engine keeps its
attention.
"""

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from ptf.errors import UserError
from ptf.model.config import DecoderConfig
from ptf.model.kernels.attention import Flex, InsideDocuments
from ptf.model.kernels.delta_rule import Chunks
from ptf.varlen import Varlen

Package = Literal["flash_attn", "flash_attn_4", "liger_kernel", "fla"]
DISTRIBUTIONS = {
    "flash_attn": "flash-attn",
    "flash_attn_4": "flash-attn-4",
    "liger_kernel": "liger-kernel",
    "fla": "flash-linear-attention",
}
MODULES = {"flash_attn_4": "flash_attn.cute"}  # where they are not called like the package
HOPPER = (9, 0)  # compute capability; flash_attn_4 has no backward pass below it,
AFTER_BLACKWELL = (12, 0)  # and from here on none that repeats
Setting = Literal["auto"] | Sequence[Package]
MOST_HEAD_DIM = 256  # of flash_attn


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None.

    The distribution counts: flash-attn-4 has a module `flash_attn`, too, without the functions of flash-attn.
    """
    try:
        return version(DISTRIBUTIONS[package])
    except PackageNotFoundError:
        return None


def packages_of(setting: Setting, device: torch.device, precision: str) -> dict[str, str]:
    """Return the packages that `train.fused` uses on a device, with their versions.

    `auto` leaves out flash_attn_4, which has to be named, and from Hopper on flash_attn: on an H200 FlexAttention is
    faster than the kernels of its version 2 that come with torch (benchmarks/gpu_attention.py).
    Raises UserError for a package that is asked for by name and cannot be used, or is installed and cannot be imported.
    """
    found: dict[str, str] = {}
    for package in ("flash_attn", "liger_kernel", "fla") if setting == "auto" else setting:
        reason = why_not(package, device, precision)
        if reason is not None and setting != "auto":
            raise UserError(f"train.fused: {package} cannot be used: {reason}. `auto` leaves it out, [] uses nothing")
        if reason is None:
            found[package] = cast("str", installed(package))
    if setting == "auto" and "flash_attn" in found and capability(device) >= HOPPER:
        del found["flash_attn"]
    if found.keys() >= {"flash_attn", "flash_attn_4"}:
        raise UserError("train.fused: flash_attn and flash_attn_4 both compute attention; name one of them")
    for package, has in found.items():
        try:
            importlib.import_module(MODULES.get(package, package))
        except ImportError as error:
            raise UserError(
                f"{package} {has} is installed and cannot be imported ({error}); install it again, or leave it out of "
                "train.fused"
            ) from error
    return found


def why_not(package: Package, device: torch.device, precision: str) -> str | None:
    """Return why a package cannot be used on a device, or None if it can."""
    if device.type != "cuda":
        return f"it needs a GPU, and this run computes on {device}"
    if package != "liger_kernel" and precision != "bf16":
        return f"it computes in 16 bits only, and train.precision is {precision}"
    if installed(package) is None:
        return f"it is not installed (pip install {DISTRIBUTIONS[package]})"
    if package == "flash_attn_4" and not HOPPER <= capability(device) < AFTER_BLACKWELL:
        return "it trains on GPUs of compute capability 9 to 11"
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def varlen_of(segments: Tensor, positions: Tensor) -> Varlen:
    """Return the `Varlen` of a batch from its tensors; the host waits for the device. A `Batch` knows its own."""
    length = segments.shape[1]
    segment, position = (t.cpu().numpy().reshape(-1) for t in (segments, positions))
    begins = np.arange(len(segment)) % length == 0
    begins[1:] |= segment[1:] != segment[:-1]
    starts = np.flatnonzero(begins)
    cu_seqlens = np.append(starts, len(segment)).astype(np.int32)
    max_seqlen = int(np.diff(cu_seqlens).max(initial=0))
    return Varlen(torch.from_numpy(cu_seqlens).to(segments.device), max_seqlen, bool(position[starts].any()))


class Flash(InsideDocuments):
    """Causal attention inside each document by `flash_attn_varlen_func`, one call a layer.

    The padding of a sequence is one more document. Batches in which documents share a prefix are computed by Flex.
    """

    package: Package = "flash_attn"
    unlimited: int | None = -1  # size of a window, for the package

    def __init__(self, segments: Tensor, positions: Tensor, varlen: Varlen | None = None) -> None:
        self.segments, self.positions = segments, positions
        self.cu_seqlens, max_seqlen, shares_prefix = varlen or varlen_of(segments, positions)
        self.flex = Flex(segments, positions) if shares_prefix else None
        # with 1 and grouped queries the package computes something else (its issue 1537); a larger bound is allowed
        self.max_seqlen = max(2, max_seqlen)

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output [B, T, heads, D]; the arguments are those of `Attend`."""
        if self.flex is not None:
            return self.flex(layer, q, k, v)
        # the function of flash_attn 4 returns the log-sum-exp, too
        out = importlib.import_module(MODULES.get(self.package, self.package)).flash_attn_varlen_func(
            *(t.flatten(0, 1) for t in (q, k, v)),  # [B·T, heads, D]
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen,
            softmax_scale=layer.scale,
            causal=True,
            # keys before the query, keys after it
            window_size=(self.unlimited, self.unlimited) if layer.window is None else (layer.window - 1, 0),
            deterministic=True,  # otherwise the backward pass adds in the order in which the GPU's blocks end
        )
        return (out[0] if isinstance(out, tuple) else out).view_as(q)

    @classmethod
    def obstacle(cls, c: DecoderConfig) -> str | None:
        """Return why the package cannot compute the attention of a model, or None if it can."""
        if c.sinks:
            return "it has no attention sinks"
        if c.attention_softcap is not None:
            return "its scores are not soft-capped"
        if c.latent is not None:
            return "it computes no values that are narrower than keys"
        return f"its heads have {MOST_HEAD_DIM} dimensions at most" if c.head_dim > MOST_HEAD_DIM else None


class Flash4(Flash):
    """The same by flash_attn 4, which needs a GPU of Hopper's or Blackwell's generation."""

    package, unlimited = "flash_attn_4", None

    @classmethod
    @override
    def obstacle(cls, c: DecoderConfig) -> str | None:
        if any(layer.window for layer in c.layers):
            return "its windows were not compared on a GPU yet"
        if 128 < c.head_dim < MOST_HEAD_DIM:
            return f"its heads have 128 dimensions at most, or {MOST_HEAD_DIM}"
        return super().obstacle(c)


def fla_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to a packed batch, as `delta_rule.chunked` does, in 16 bits with states in fp32.

    The padding of a sequence is one more document, whose result is nobody's.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, states = chunk_gated_delta_rule(
        q[None],
        k[None],
        v[None],
        g=decay[None],
        beta=beta[None],
        scale=1.0,  # queries and keys have their lengths already
        output_final_state=True,
        cu_seqlens=chunks.bounds,
    )
    return out[0], states.index_select(0, chunks.numbers)


def liger_gate(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Compute act(gate) · up with Liger's functions, whose backward pass writes the gradients into gate and up: nobody
    else has them."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    function: Any = LigerSiLUMulFunction if activate is F.silu else LigerGELUMulFunction
    return function.apply(gate, up)
