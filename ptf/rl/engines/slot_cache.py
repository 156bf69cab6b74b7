"""The key-value cache of responses that begin and end at different times: a slot for each, with its context."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ptf.model.attention import Attend, Attention, backend, soft_cap_of, soft_capped
from ptf.model.config import DecoderConfig

BLOCK = 128  # the slots' length is a multiple of it


class SlotCache:
    """Keys and values of `lengths` tokens in each of the first `len(lengths)` slots; it grows when it must."""

    def __init__(self, c: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = np.zeros(0, np.int64)
        # keys; values
        self.stored = torch.zeros(2, c.num_layers, 0, c.kv_heads, 0, c.head_dim, device=device, dtype=dtype)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens."""
        have_slots, have_length = self.stored.shape[2], self.stored.shape[4]
        if slots <= have_slots and length <= have_length:
            return
        slots = max(have_slots, 1 << (slots - 1).bit_length())
        length = max(have_length, -(-length // BLOCK) * BLOCK)
        two, layers, _, heads, _, size = self.stored.shape
        larger = self.stored.new_zeros(two, layers, slots, heads, length, size)
        larger[:, :, :have_slots, :, :have_length] = self.stored
        self.stored = larger

    def append(self, lengths: Sequence[int]) -> int:
        """Occupy further slots with contexts of these lengths; return the first of them."""
        first = len(self.lengths)
        self.lengths = np.concatenate([self.lengths, np.asarray(lengths, np.int64)])
        return first

    def prefill(self, slots: Tensor, segments: Tensor, positions: Tensor) -> Attend:
        """Attend inside each context, and store the keys and values of context i in slot `slots[i]`."""
        inside = backend(segments.device)(segments, positions)
        real = segments.reshape(-1) >= 0
        row, at = slots[segments.reshape(-1)[real]], positions.reshape(-1)[real]

        def attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for stored, values in zip(self.stored[:, layer.layer], (k, v), strict=True):
                stored[row, :, at] = values.flatten(0, 1)[real].to(stored.dtype)
            return inside(layer, q, k, v)

        return attend

    def copy(self, source: int, target: int) -> None:
        """Copy the tokens of a slot to another one."""
        n = int(self.lengths[source])
        self.stored[:, :, target, :, :n] = self.stored[:, :, source, :, :n]
        self.lengths[target] = n

    def free(self, slot: int) -> None:
        """Free a slot; the last slot takes its place."""
        last = len(self.lengths) - 1
        if slot != last:
            self.copy(last, slot)
        self.lengths = self.lengths[:last]

    def step(self) -> Attend:
        """Attend from one new token of every slot to itself and all tokens before it."""
        lengths = torch.from_numpy(self.lengths).to(self.stored.device)  # of what is before the new token
        n, longest = len(lengths), int(self.lengths.max()) + 1
        slots, at = torch.arange(n, device=lengths.device), torch.arange(longest, device=lengths.device)
        later = at > lengths[:, None]  # [n, longest]
        self.lengths = self.lengths + 1

        def attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for stored, values in zip(self.stored[:, layer.layer], (k, v), strict=True):
                stored[slots, :, lengths] = values[:, 0].to(stored.dtype)
            keys, values = self.stored[
                :, layer.layer, :n, :, :longest
            ].float()  # a cache of bf16 is computed with in fp32
            hidden = later if layer.window is None else later | (lengths[:, None] - at >= layer.window)
            _, _, heads, size = q.shape
            kv_heads = keys.shape[1]
            query = (q[:, 0].float() * layer.scale).view(n, kv_heads, heads // kv_heads, size)
            scores = soft_capped(query @ keys.mT, soft_cap_of(layer)).masked_fill(hidden[:, None, None], float("-inf"))
            if layer.sinks is not None:
                sinks = layer.sinks.to(query.dtype).view(1, kv_heads, -1, 1).expand(n, -1, -1, -1)
                scores = torch.cat([scores, sinks], -1)
            out = scores.softmax(-1)[..., :longest] @ values
            return out.view(n, 1, heads, size).to(q.dtype)

        return attend
