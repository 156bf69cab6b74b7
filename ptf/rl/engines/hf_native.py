"""The native engine for models of transformers (`model.backend: hf`).

Requests whose contexts are equally long share a batch without padding, with transformers' own cache, so any
architecture runs whose cache is right: that is tested when the engine starts, against whole forward passes. Without
such a cache (none, or other logits) each token costs a forward pass over everything before it. A batch is computed
until its last response ends. For a fast rollout use vllm.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ptf.data.trajectory import Generation
from ptf.data.trie import Trie
from ptf.errors import first_line
from ptf.model import hf_backend, hf_checks
from ptf.model.head import Head
from ptf.model.hf_checks import PROBE
from ptf.model.layers import LayerFactory
from ptf.model.model import Model
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import Request
from ptf.rl.engines.response import ResponseInProgress

STEPS = 4  # tokens after a context, with which the cache is compared with whole forward passes
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1}  # in log-probs
CACHES = ("past_key_values", "cache_params")  # names under which transformers' models take and return their cache


class HFNativeEngine(NativeEngine):
    """RolloutEngine on a model of transformers."""

    def __init__(self, directory: str, *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(directory, dtype=dtype, **{**options, "continuous": False})
        self.why_uncached = self._why_uncached()
        if self.why_uncached:
            kind = cast("Any", self.model).hf.config.model_type
            print(
                f"rollout: native: {kind} generates without a cache, at the cost of a whole "
                f"forward pass for each token: {self.why_uncached}",
                flush=True,
            )

    def load_model(
        self, directory: Path, device: torch.device, dtype: torch.dtype, factory: LayerFactory | None, seed: int
    ) -> Model:
        """See NativeEngine. Buffers keep their dtype."""
        model = hf_backend.build(directory, head="lm", factory=factory)
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
        model.give_weights(directory, device, seed=seed)
        return model

    @torch.no_grad()
    def _why_uncached(self) -> str:
        """Return why transformers' cache is not used; '' if it is."""
        if cast("Any", self.model).switches_at is not None:
            return "its rotary frequencies change with the length (longrope)"
        part, whole = hf_checks.probe_lengths(cast("Any", self.model))
        for context in (PROBE, part - STEPS // 2, whole - STEPS):
            length = max(1, context) + STEPS
            ids = (torch.arange(2 * length).view(2, -1) * 7 % cast("Any", self.model).table_rows).to(self.device)
            try:
                batch = _Batch(self, ids[:, :-STEPS])
                steps = [batch.logits, *(batch.step(ids[:, i - STEPS, None]) for i in range(STEPS))]
            except Exception as error:  # whatever a model's cache raises, whole forward passes give the same tokens
                return f"its cache fails ({type(error).__name__}: {first_line(error)})"
            for i, logits in enumerate(steps):
                expected = self._whole([row[: length - STEPS + i] for row in ids.cpu().numpy()])
                apart = (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max()
                if not float(apart) <= TOLERANCE[self.dtype]:
                    return f"its cache gives other log-probs than its forward pass (by {float(apart):.1g})"
        return ""

    def _whole(self, sequences: Sequence[np.ndarray]) -> Tensor:
        """Return the logits after each sequence, from forward passes over the whole of them: [sequences, V]."""
        return self._prefill(sequences, lambda *_: cast("Any", None))

    @torch.no_grad()
    def answer(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer a batch of requests to the end. Raises ValueError for a response that could be longer than rotary
        frequencies that change with the length allow."""
        limit = cast("Any", self.model).switches_at
        longest = max(len(r.context) + r.sampling.max_new_tokens for r in requests)
        if limit is not None and longest > limit:
            raise ValueError(
                f"with longrope, transformers computes other logits beyond {limit} tokens, and prompt and response may "
                f"take {longest}; lower data.seq_len and max_new_tokens, or use vllm"
            )
        if self.why_uncached:

            def recomputed(live: Sequence[ResponseInProgress], *_: object) -> Tensor:
                return self._whole([np.array([*one.request.context, *one.sampled], np.int32) for one in live])

            return self.sampled(requests, self._whole([r.context for r in requests]), recomputed)
        by_length: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_length.setdefault(len(request.context), []).append(i)
        generations: dict[int, Generation] = {}
        for rows in by_length.values():
            generations |= zip(rows, self._answer_equally_long([requests[i] for i in rows]), strict=True)
        return [generations[i] for i in range(len(requests))]

    def _answer_equally_long(self, requests: Sequence[Request]) -> list[Generation]:
        ids = torch.from_numpy(np.stack([r.context for r in requests])).long().to(self.device)
        batch = _Batch(self, ids)
        last = ids[:, -1].clone()  # a row that has ended goes on with its last token

        def cached(live: Sequence[ResponseInProgress], tokens: Tensor, *_: object) -> Tensor:
            rows = torch.tensor([one.number for one in live], device=self.device)
            last[rows] = tokens
            return batch.step(last[:, None])[rows]

        return self.sampled(requests, batch.logits, cached)

    def levels(
        self, contexts: Sequence[np.ndarray], trie: Trie, beam: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Raise ValueError: beam search needs ptf's own decoder."""
        raise ValueError("beam search does not run models of transformers (model.backend: hf)")


class _Batch:
    """Sequences of equal length that grow together over one cache."""

    def __init__(self, engine: HFNativeEngine, ids: Tensor) -> None:
        self.engine, self.cache, self.length = engine, dict[str, Any](), 0
        self.logits = self.step(ids)

    def step(self, ids: Tensor) -> Tensor:
        """Append tokens [n, t] to the sequences; return the logits after them, [n, V]."""
        model: Any = self.engine.model
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)
        self.length += ids.shape[1]
        extra = {"cache_position": positions} if "cache_params" in self.cache else {}
        out = model.body(input_ids=ids, use_cache=True, **self.cache, **extra)
        self.cache = {name: out[name] for name in CACHES if out.get(name) is not None}
        if not self.cache:
            raise LookupError("it returns none")
        head = cast("Head", model.output())
        hidden = out[0][:, -1].to(head.weight.dtype)
        return head.logits(hidden if model.scale == 1 else hidden * model.scale)
