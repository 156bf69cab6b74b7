"""Attention of one new token of each response over a cache of keys and values, by decode.cpp."""

import torch
from torch import Tensor

from ptf.model.attention import Attention, soft_cap_of
from ptf.model.cpu_kernels.library import library

Cached = tuple[Tensor, Tensor]  # keys and values of a layer, [rows, kv_heads, tokens, ·] each


def computes(layer: Attention, *tensors: Tensor) -> bool:
    """Return whether the kernel attends to these keys and values; where not, torch does."""
    plain = soft_cap_of(layer) is None and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    return plain and not any(t.shape[-1] % library().width for t in tensors)


def attention(layer: Attention, q: Tensor, contexts: Cached | None, own: Cached, places: Tensor) -> Tensor:
    """Return the attention output [n, heads, V], in fp32, of queries [n, heads, D].

    Response i attends to the tokens from `places[i, 1]` to `places[i, 2]` of context `places[i, 0]`, and to those from
    `places[i, 3]` to `places[i, 4]` of row i of `own`; `places` is [n, 5] int64. Without `contexts` the range there is
    empty.
    """
    (n, heads, size), (keys, values) = q.shape, own
    out = torch.empty(n, heads, values.shape[-1], dtype=torch.float32, device="cpu")
    before = (None, None) if contexts is None else (t.contiguous() for t in contexts)
    sinks = None if layer.sinks is None else layer.sinks.detach().float().contiguous()
    shape = keys.shape[1], size, values.shape[-1], 0 if contexts is None else contexts[0].shape[2], keys.shape[2]
    tensors = q.float().contiguous(), *before, keys.contiguous(), values.contiguous(), places.contiguous(), sinks, out
    library().call("decode", *tensors, n, heads, *shape, float(layer.scale), torch.get_num_threads())
    return out
