"""Responses that are generated together by ptf's own Decoder, each from its own beginning to its own end.

Requests enter between two steps, and leave when they end, so none waits for another. What a response's batch holds
depends on when requests arrive, so log-probs repeat except for rounding; `NativeEngine.answer` repeats to the bit.
Their cache has a slot for each response, with its context.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ptf.model.attention import Attention
from ptf.model.config import DecoderConfig
from ptf.model.kernels.attention import Attend, soft_capped
from ptf.rl.engines.kv_cache import CachedAttend, KeyValues
from ptf.rl.engines.protocol import Progress
from ptf.rl.engines.response import ResponseInProgress, distinct_contexts, sample

BLOCK = 128  # the slots' length is a multiple of it


class SlotCache(KeyValues):
    """Keys and values of `lengths` tokens in each of the first `len(lengths)` slots; it grows when it must."""

    def __init__(self, c: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(c, 0, 0, device, dtype)
        self.lengths = np.zeros(0, np.int64)

    def append(self, lengths: Sequence[int], length: int) -> None:
        """Occupy further slots with contexts of these lengths, with room for so many tokens in each."""
        self.lengths = np.concatenate([self.lengths, np.asarray(lengths, np.int64)])
        slots = len(self.lengths)
        _, have_slots, _, have_length, _ = self.stored[0].shape
        if slots <= have_slots and length <= have_length:
            return
        slots = max(have_slots, 1 << (slots - 1).bit_length())
        length = max(have_length, -(-length // BLOCK) * BLOCK)
        for which, stored in enumerate(self.stored):
            layers, _, heads, _, size = stored.shape
            self.stored[which] = stored.new_zeros(layers, slots, heads, length, size)
            self.stored[which][:, :have_slots, :, :have_length] = stored

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
            scores = soft_capped(query @ keys.mT, layer).masked_fill(hidden[:, None, None], float("-inf"))
            if layer.sinks is not None:
                sinks = layer.sinks.to(query.dtype).view(1, kv_heads, -1, 1).expand(n, -1, -1, -1)
                scores = torch.cat([scores, sinks], -1)
            return (scores.softmax(-1)[..., :longest] @ values).reshape(n, 1, heads, -1).to(q.dtype)

        return CachedAttend(attend, self.delta.step)


class ContinuousBatch:
    """The responses of a model that are generated at the moment, at most `most`; others wait.

    `prefill(contexts, attend_of)` computes contexts and returns the logits after each, [contexts, V]; `attend_of` is
    called with their segments and positions. `decode(tokens, positions, attend, contexts)` returns the logits after one
    token of each response; `contexts` gives all its tokens to there.
    """

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        prefill: Callable[[Sequence[np.ndarray], Callable[[Tensor, Tensor], Attend]], Tensor],
        decode: Callable[[Tensor, Tensor, Attend, Callable[[], Sequence[np.ndarray]]], Tensor],
        most: int,
    ) -> None:
        self.config, self.device, self.dtype, self.most = config, device, dtype, most
        self.prefill, self.decode = prefill, decode
        self.waiting: list[ResponseInProgress] = []  # they begin with the next step
        self.responses: list[ResponseInProgress] = []  # by slot
        self._empty()

    def _empty(self) -> None:
        self.cache = SlotCache(self.config, self.device, self.dtype)
        self.logits: Tensor | None = None  # of each response's next token, [responses, V]

    def abort(self, numbers: Sequence[int]) -> None:
        """Drop responses."""
        self.waiting = [response for response in self.waiting if response.number not in numbers]
        self._free([slot for slot, response in enumerate(self.responses) if response.number in numbers])

    def step(self, version: int) -> list[Progress]:
        """Sample one token of each response; return those of streamed responses, and the responses that end."""
        self._admit()
        if self.logits is None:
            return []
        sample(self.responses, self.logits)
        news = [response.progress(version) for response in self.responses if response.streamed or response.ended]
        self._free([slot for slot, response in enumerate(self.responses) if response.ended])
        if self.responses:
            last = torch.tensor([response.sampled[-1] for response in self.responses], device=self.device)
            positions = torch.from_numpy(self.cache.lengths).to(self.device)
            attend, live = self.cache.step(), self.responses
            self.logits = self.decode(
                last[:, None], positions[:, None], attend, lambda: [response.tokens for response in live]
            )
        return news

    def _admit(self) -> None:
        """Compute the contexts of waiting requests; equal ones are computed once."""
        admitted = self.waiting[: self.most - len(self.responses)]
        if not admitted:
            return
        self.waiting = self.waiting[len(admitted) :]
        longest = max(len(a.request.context) + a.request.sampling.max_new_tokens for a in admitted)
        first = len(self.responses)
        self.cache.append([len(a.request.context) for a in admitted], longest)
        contexts, which = distinct_contexts([response.request for response in admitted])
        slots = [first + which.index(i) for i in range(len(contexts))]  # of each context: that of its first request
        rows = torch.tensor(slots, device=self.device)
        logits = self.prefill(contexts, lambda segments, positions: self.cache.prefill(segments, positions, rows))
        for slot, i in enumerate(which, first):
            if slots[i] != slot:
                self.cache.copy(slots[i], slot)
        logits = logits[torch.tensor(which, device=self.device)]
        self.logits = logits if self.logits is None else torch.cat([self.logits, logits])
        self.responses += admitted

    def _free(self, slots: Sequence[int]) -> None:
        """End the responses in these slots; the last responses take their places."""
        rows = list(range(len(self.responses)))
        for slot in sorted(slots, reverse=True):
            self.cache.free(slot)
            rows[slot] = rows[-1]
            rows.pop()
        self.responses = [self.responses[row] for row in rows]
        if slots and self.logits is not None:
            self.logits = self.logits[rows]
            if not self.responses:
                self._empty()
