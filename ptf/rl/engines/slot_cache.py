"""The key-value cache of responses that begin and end at different times: a slot for each, with its context."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ptf.model.attention import Attend, Attention, soft_cap_of, soft_capped
from ptf.model.config import DecoderConfig
from ptf.rl.engines.kv_cache import CachedAttend, DeltaCache, filling, places_of

BLOCK = 128  # the slots' length is a multiple of it


class SlotCache:
    """Keys and values of `lengths` tokens in each of the first `len(lengths)` slots; it grows when it must."""

    def __init__(self, c: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths = np.zeros(0, np.int64)
        self.place = places_of(c)
        # keys; values: [layers with softmax attention, slots, kv_heads, length, D]
        self.stored = [
            torch.zeros(len(self.place), 0, c.kv_heads, 0, size, device=device, dtype=dtype)
            for size in (c.head_dim, c.value_dim)
        ]
        self.delta = DeltaCache()  # by slot

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens."""
        _, have_slots, _, have_length, _ = self.stored[0].shape
        if slots <= have_slots and length <= have_length:
            return
        slots = max(have_slots, 1 << (slots - 1).bit_length())
        length = max(have_length, -(-length // BLOCK) * BLOCK)
        for which, stored in enumerate(self.stored):
            layers, _, heads, _, size = stored.shape
            self.stored[which] = stored.new_zeros(layers, slots, heads, length, size)
            self.stored[which][:, :have_slots, :, :have_length] = stored

    def append(self, lengths: Sequence[int]) -> int:
        """Occupy further slots with contexts of these lengths; return the first of them."""
        first = len(self.lengths)
        self.lengths = np.concatenate([self.lengths, np.asarray(lengths, np.int64)])
        return first

    def prefill(self, slots: Tensor, segments: Tensor, positions: Tensor) -> Attend:
        """Attend inside each context, and store the keys and values of context i in slot `slots[i]`."""
        return filling(self.stored, self.place, self.delta, segments, positions, slots)

    def copy(self, source: int, target: int) -> None:
        """Copy the tokens of a slot to another one."""
        n = int(self.lengths[source])
        for stored in self.stored:
            stored[:, target, :, :n] = stored[:, source, :, :n]
        self.delta.copy(source, target)
        self.lengths[target] = n

    def free(self, slot: int) -> None:
        """Free a slot; the last slot takes its place."""
        last = len(self.lengths) - 1
        if slot != last:
            self.copy(last, slot)
        self.lengths = self.lengths[:last]

    def step(self) -> Attend:
        """Attend from one new token of every slot to itself and all tokens before it."""
        lengths = torch.from_numpy(self.lengths).to(self.stored[0].device)  # of what is before the new token
        n, longest = len(lengths), int(self.lengths.max()) + 1
        slots, at = torch.arange(n, device=lengths.device), torch.arange(longest, device=lengths.device)
        later = at > lengths[:, None]  # [n, longest]
        self.lengths = self.lengths + 1

        def attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = self.place[layer.layer]
            for stored, values in zip(self.stored, (k, v), strict=True):
                stored[place][slots, :, lengths] = values[:, 0].to(stored.dtype)
            # a cache of bf16 is computed with in fp32
            keys, values = (stored[place][:n, :, :longest].float() for stored in self.stored)
            hidden = later if layer.window is None else later | (lengths[:, None] - at >= layer.window)
            _, _, heads, size = q.shape
            kv_heads = keys.shape[1]
            query = (q[:, 0].float() * layer.scale).view(n, kv_heads, heads // kv_heads, size)
            scores = soft_capped(query @ keys.mT, soft_cap_of(layer)).masked_fill(hidden[:, None, None], float("-inf"))
            if layer.sinks is not None:
                sinks = layer.sinks.to(query.dtype).view(1, kv_heads, -1, 1).expand(n, -1, -1, -1)
                scores = torch.cat([scores, sinks], -1)
            return (scores.softmax(-1)[..., :longest] @ values).reshape(n, 1, heads, -1).to(q.dtype)

        return CachedAttend(attend, self.delta.step)
