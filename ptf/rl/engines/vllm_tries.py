"""Restricts requests to their tries inside of vLLM, which imports `OnlyAllowed` by name where it samples."""

import functools
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from ptf.data.trie import OVER, Trie, TrieCursor
from ptf.rl.engines.vllm_engine import TRIE

_trie = functools.lru_cache(maxsize=8)(Trie.load)


class Restriction:
    """Restricts one request to its trie; vLLM calls it with the sampled ids so far and the next logits, [V]."""

    def __init__(self, trie: Trie) -> None:
        self.walk, self.length = TrieCursor(trie), 0

    def __call__(self, sampled: list[int], logits: Tensor) -> Tensor:
        """Return the logits [vocabulary] with those of tokens that are not allowed next at minus infinity."""
        if len(sampled) < self.length:  # vLLM has interrupted the request and starts it again
            self.walk, self.length = TrieCursor(self.walk.trie), 0
        for token in sampled[self.length :]:
            self.walk.follow(token)
        self.length = len(sampled)
        if self.walk.state != OVER:
            allowed = self.walk.allowed()
            kept = logits[allowed]
            logits.fill_(-float("inf"))[allowed] = kept
        return logits


class OnlyAllowed(AdapterLogitsProcessor):
    """Gives each request that has a trie its restriction."""

    def is_argmax_invariant(self) -> bool:
        """Return False: the likeliest token may not be allowed."""
        return False

    def new_req_logits_processor(self, params: Any) -> Restriction | None:
        """Return what restricts a request; None without a trie."""
        path = (params.extra_args or {}).get(TRIE)
        return Restriction(_trie(path)) if path else None
