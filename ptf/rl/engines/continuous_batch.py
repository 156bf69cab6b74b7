"""Responses that are generated together by ptf's own Decoder, each from its own beginning to its own end.

Requests enter between two steps, and leave when they end, so none waits for another. What a response's batch holds
depends on when requests arrive, so log-probs repeat except for rounding; `NativeEngine.answer` repeats to the bit.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ptf.model.attention import Attend
from ptf.model.config import DecoderConfig
from ptf.rl.engines.protocol import Progress
from ptf.rl.engines.response import ResponseInProgress, sample
from ptf.rl.engines.slot_cache import SlotCache


class ContinuousBatch:
    """The responses of a model that are generated at the moment, at most `most`; others wait.

    `prefill(contexts, attend_of)` computes contexts and returns the logits after each, [contexts, V]; `attend_of` is
    called with their segments and positions. `decode(tokens, positions, attend)` returns the logits after one token
    of each response.
    """

    def __init__(
        self,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        prefill: Callable[[Sequence[np.ndarray], Callable[[Tensor, Tensor], Attend]], Tensor],
        decode: Callable[[Tensor, Tensor, Attend], Tensor],
        most: int,
    ) -> None:
        self.config, self.device, self.dtype, self.most = config, device, dtype, most
        self.prefill, self.decode = prefill, decode
        self.waiting: list[ResponseInProgress] = []
        self.responses: list[ResponseInProgress] = []  # by slot
        self._empty()

    def _empty(self) -> None:
        self.cache = SlotCache(self.config, self.device, self.dtype)
        self.logits: Tensor | None = None  # of each response's next token, [responses, V]

    def add(self, response: ResponseInProgress) -> None:
        """Begin a response with the next step."""
        self.waiting.append(response)

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
        news = [self._progress(response, version) for response in self.responses if response.streamed or response.ended]
        self._free([slot for slot, response in enumerate(self.responses) if response.ended])
        if self.responses:
            last = torch.tensor([response.sampled[-1] for response in self.responses], device=self.device)
            positions = torch.from_numpy(self.cache.lengths).to(self.device)
            self.logits = self.decode(last[:, None], positions[:, None], self.cache.step())
        return news

    @staticmethod
    def _progress(response: ResponseInProgress, version: int) -> Progress:
        return Progress(
            response.number,
            np.array(response.sampled[-1:], np.int32),
            np.array(response.logprobs[-1:], np.float32),
            response.generation(version) if response.ended else None,
        )

    def _admit(self) -> None:
        """Compute the contexts of waiting requests; equal ones are computed once."""
        admitted = self.waiting[: self.most - len(self.responses)]
        if not admitted:
            return
        self.waiting = self.waiting[len(admitted) :]
        longest = max(len(a.request.context) + a.request.sampling.max_new_tokens for a in admitted)
        self.cache.reserve(len(self.responses) + len(admitted), longest)
        first = self.cache.append([len(a.request.context) for a in admitted])
        keys = [response.request.context.tobytes() for response in admitted]
        slot_of: dict[bytes, int] = {}
        for slot, key in enumerate(keys, first):
            slot_of.setdefault(key, slot)
        index = {key: i for i, key in enumerate(slot_of)}
        which = [index[key] for key in keys]  # of each admitted request: its context among the different ones
        slots = torch.tensor(list(slot_of.values()), device=self.device)
        contexts = [admitted[slot - first].request.context for slot in slot_of.values()]
        logits = self.prefill(contexts, lambda segments, positions: self.cache.prefill(slots, segments, positions))
        for slot, key in enumerate(keys, first):
            if (source := slot_of[key]) != slot:
                self.cache.copy(source, slot)
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
