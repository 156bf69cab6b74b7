"""What `flash_attn`, versions 2 and 4, `liger_kernel` and `fla` compute, in plain PyTorch, written from their
documentation: the calls that ptf makes are tested with these, since the packages themselves need a GPU.

flash_attn 2.8 (`flash_attn_varlen_func`): documents lie end to end, `cu_seqlens` are int32; the causal mask is aligned
to the bottom right; a query at i sees the keys from i + k - q - left to i + k - q + right, both included, -1 is
unlimited; head h of 6 queries uses head h // 3 of 2 keys. liger_kernel 0.8 and fla 0.4: see each function.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The package's function, with its arguments."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert dropout_p == softcap == 0.0
    assert (cu_seqlens_q[-1], cu_seqlens_k[-1]) == (len(q), len(k))
    # https://github.com/Dao-AILab/flash-attention/issues/1537
    assert max_seqlen_q > 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)  # sums are in fp32 at least
    q, k, v = (t.to(wide) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = torch.full_like(q, torch.nan)  # rows that no document has are not written
    left, right = (torch.inf if size < 0 else size for size in window_size)
    right = min(right, 0) if causal else right
    for i in range(len(cu_seqlens_q) - 1):
        a, b, c, d = (int(n) for n in (*cu_seqlens_q[i : i + 2], *cu_seqlens_k[i : i + 2]))
        assert b > a
        b, d = min(b, a + max_seqlen_q), min(d, c + max_seqlen_k)  # nothing is computed beyond the longest
        at = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        seen = (torch.arange(d - c) >= at - left) & (torch.arange(d - c) <= at + right)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[c:d])
    return out.to(dtype)


def flash_attn_4_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int | None, int | None] = (None, None), **named: Any
) -> tuple[Tensor, None]:
    """The function of flash-attn-4: unlimited is None, and the output comes with a log-sum-exp, here without."""
    assert -1 not in window_size
    left, right = (-1 if size is None else size for size in window_size)
    return flash_attn_varlen_func(q, k, v, window_size=(left, right), **named), None


class _Gate(Function):
    """act(a) · b; the backward pass writes the gradients into a and b, which no version counter tells."""

    activate: Any

    @classmethod
    def forward(cls, ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return cls.activate(a) * b

    @classmethod
    def backward(cls, ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors  # once: recomputation gives them once
        with torch.enable_grad():
            a, b = (t.detach().clone().requires_grad_() for t in saved)
            found = torch.autograd.grad(cls.activate(a) * b, (a, b), grads[0])
        return tuple(t.data.copy_(grad) for t, grad in zip(saved, found, strict=True))


class LigerSiLUMulFunction(_Gate):
    """silu(a) · b."""

    activate = staticmethod(F.silu)


class LigerGELUMulFunction(_Gate):
    """gelu(a) · b, with the tanh approximation."""

    activate = staticmethod(lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token: q, k, v [1, T, heads, ..], g and beta [1, T, heads]; documents lie end to
    end by `cu_seqlens` (int64). Returns the output, and the last states [documents, heads, key_dim, value_dim], fp32.
    """
    assert cu_seqlens is not None
    assert cu_seqlens.dtype == torch.int64
    assert len(q) == 1
    assert initial_state is None
    assert not use_qk_l2norm_in_kernel
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    outs, states = [], []
    for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        state = torch.zeros(*k.shape[2:], v.shape[-1], dtype=torch.promote_types(k.dtype, torch.float32))
        for t in range(first, end):
            state = g[0, t].exp()[:, None, None] * state
            change = beta[0, t, :, None] * (v[0, t] - (k[0, t, :, None] @ state.to(k.dtype))[:, 0])
            state = state + k[0, t, :, :, None] @ change[:, None].to(k.dtype)
            outs.append(scale * (q[0, t, :, None] @ state.to(q.dtype))[:, 0])
        states.append(state)
    return torch.stack(outs)[None], torch.stack(states) if output_final_state else None


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages importable."""
    contents: dict[str, Any] = {
        "flash_attn": flash_attn_varlen_func,
        "flash_attn.cute": flash_attn_4_varlen_func,
        "liger_kernel": None,
        "liger_kernel.ops": None,
        "liger_kernel.ops.swiglu": LigerSiLUMulFunction,
        "liger_kernel.ops.geglu": LigerGELUMulFunction,
        "fla": None,
        "fla.ops": None,
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    }
    for name, value in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # transformers looks for it
        if value is not None:
            setattr(module, value.__name__.replace("_4", ""), value)
        monkeypatch.setitem(sys.modules, name, module)
