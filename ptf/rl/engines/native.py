"""Generation with ptf's own Decoder: for CPUs without vLLM, and for models that vLLM does not support.

By default all waiting requests are answered as one batch over a static key-value cache, so that a run repeats to the
bit; equal contexts (those of the samples of one prompt) are computed once. With `continuous`, requests enter and leave
the batch at any token (ptf.rl.engines.continuous_batch). A request has its own generator of random numbers, so its
response does not depend on its batch.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptf.compute.device_defaults import multiplies_bf16
from ptf.compute.offload import OffloadedTensors
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.trajectory import Generation
from ptf.data.trie import OVER, Trie
from ptf.model import bridge, model_files
from ptf.model.chunked import sampled_from, token_logprobs
from ptf.model.head import Head
from ptf.model.kernels.attention import Attend, inside_documents
from ptf.model.layers import LayerFactory
from ptf.model.model import Model
from ptf.model.sampling import restrict
from ptf.rl.engines.continuous_batch import ContinuousBatch
from ptf.rl.engines.kv_cache import Cache
from ptf.rl.engines.protocol import NOTHING, Progress, Request, edges_of
from ptf.rl.engines.response import ResponseInProgress, distinct_contexts, sample
from ptf.rl.engines.stepper import Stepper
from ptf.rl.weights.streamed import Transfer
from ptf.rl.weights.verification import Buckets, Manifest, Receipt, SyncError, check
from ptf.workspace import progress

BATCH = 1024  # requests that are answered at once
PREFILL_TOKENS = 8192  # of contexts that are computed in one pass on a GPU


class NativeEngine:
    """RolloutEngine on ptf's own Decoder."""

    name = "native"

    def __init__(
        self,
        directory: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        version: int,
        batch: int = BATCH,
        continuous: bool = False,
        factory: LayerFactory | None = None,
        prefill_tokens: int | None = None,
        seed: int = 0,
        offload_file: Path | None = None,
    ) -> None:
        self.model = self.load_model(Path(directory), device, dtype, factory, seed)
        self.device, self.dtype, self.version, self.batch = device, dtype, version, batch
        # on a GPU contexts are computed in passes of one shape, since attention is compiled for each shape
        self.prefill_tokens = prefill_tokens or (PREFILL_TOKENS if device.type == "cuda" else None)
        self.offloaded = OffloadedTensors(offload_file)
        self.in_batches = not continuous
        self.numbers = itertools.count()
        self.stepper = Stepper(self)
        # see StreamingEngine; an engine that answers in batches yields a whole response at once
        self.generate, self.stream = self.stepper.generate, self.stepper.stream
        self.batches: deque[tuple[set[int], dict[int, Request]]] = deque()  # numbers that somebody waits for, and all
        # attention over a cache is computed in fp32
        self.cache_dtype = torch.float32 if device.type == "cpu" else dtype
        self.continuous = (
            ContinuousBatch(self.model.config, device, self.cache_dtype, self._prefill, self._logits, batch)
            if continuous
            else None
        )
        if device.type == "cuda":  # compile attention for the one shape in which contexts are computed
            self.prompt_logprobs([np.zeros(2, np.int32)])

    def load_model(
        self, directory: Path, device: torch.device, dtype: torch.dtype, factory: LayerFactory | None, seed: int
    ) -> Model:
        """Return the frozen model of a directory."""
        model = bridge.load(directory, device, head="lm", factory=factory, seed=seed)
        return model.to(dtype).requires_grad_(False).eval()

    def add(self, requests: Sequence[Request], streamed: Sequence[bool]) -> list[int]:
        """See SteppingEngine. In batches, those that arrived together are answered together."""
        numbers = [next(self.numbers) for _ in requests]
        if self.continuous:
            self.continuous.waiting += map(ResponseInProgress, numbers, requests, streamed)
            return numbers
        for first in range(0, len(numbers), self.batch):
            part = slice(first, first + self.batch)
            self.batches.append((set(numbers[part]), dict(zip(numbers[part], requests[part], strict=True))))
        return numbers

    @torch.no_grad()
    def step(self) -> list[Progress]:
        """See SteppingEngine: one token of each response, or all of a batch."""
        if self.continuous:
            return self.continuous.step(self.version)
        wanted, batch = self.batches.popleft()
        try:
            generations = self.answer(list(batch.values()))
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            return [Progress(number, *NOTHING, error=error) for number in wanted]
        if len(generations) != len(batch):
            raise RuntimeError(
                f"the rollout engine {self.name} gave {len(generations)} responses to {len(batch)} requests"
            )
        return [
            Progress(number, one.sampled_ids, one.logprobs, one)
            for number, one in zip(batch, generations, strict=True)
            if number in wanted
        ]

    def abort(self, numbers: Sequence[int]) -> None:
        """See SteppingEngine. A batch is answered whole, unless nobody waits for any of it."""
        if self.continuous:
            self.continuous.abort(numbers)
        for wanted, _ in self.batches:
            wanted.difference_update(numbers)
        self.batches = deque(batch for batch in self.batches if batch[0])

    @torch.no_grad()
    def answer(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer a batch of requests to the end."""
        contexts, indices = distinct_contexts(requests)
        longest = max(r.sampling.max_new_tokens for r in requests)
        cache = Cache(self.model.config, list(map(len, contexts)), longest, self.device, self.cache_dtype)
        logits = self._prefill(contexts, cache.prefill)  # [contexts, V]
        which = torch.tensor(indices, device=self.device)
        cache.map_contexts(which)

        def following(live: Sequence[ResponseInProgress], tokens: Tensor, kept: Tensor | None) -> Tensor:
            if kept is not None:
                cache.keep(kept)
            turn = len(live[0].sampled) - 1
            positions = torch.tensor([[len(one.request.context) + turn] for one in live], device=self.device)
            return self._logits(tokens[:, None], positions, cache.step(turn), lambda: [one.tokens for one in live])

        return self.sampled(requests, logits[which], following)

    def sampled(
        self,
        requests: Sequence[Request],
        logits: Tensor,
        following: Callable[[Sequence[ResponseInProgress], Tensor, Tensor | None], Tensor],
    ) -> list[Generation]:
        """Sample responses from the logits of their first tokens, [requests, V], to their ends.

        `following(live, tokens, kept)` returns the next logits of the responses that go on, given their last tokens
        and which rows of the turn before they are (None: all).
        """
        responses = [ResponseInProgress(number, request) for number, request in enumerate(requests)]
        live, longest = responses, max(r.sampling.max_new_tokens for r in requests)
        for _ in progress.counted(range(longest), f"generate {len(requests)} responses", "tokens each"):
            tokens, kept = sample(live, logits), None
            if not (rows := [row for row, response in enumerate(live) if not response.ended]):
                break
            if len(rows) < len(live):
                kept = torch.tensor(rows, device=self.device)
                live, tokens = [live[row] for row in rows], tokens[kept]
            logits = following(live, tokens, kept)
        return [response.generation(self.version) for response in responses]

    @torch.no_grad()
    def next_logits(self, contexts: Sequence[np.ndarray]) -> Tensor:
        """Return the logits of the token after each context, [contexts, V] fp32."""
        return self._prefill(contexts, inside_documents).float()

    @torch.no_grad()
    def levels(
        self, contexts: Sequence[np.ndarray], trie: Trie, beam: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Search the trie's responses to each context by beam search, and yield the candidates of each length.

        Candidates are all continuations, by one token, of the `beam` likeliest beginnings; yielded are the index of
        their context, the trie's state after them, and their log-probability among the allowed responses, [n] each.
        """
        cache = Cache(self.model.config, list(map(len, contexts)), max(trie.longest - 1, 1), self.device, torch.float32)
        logits = self._prefill(contexts, cache.prefill).float()
        owner, states, scores = np.arange(len(contexts)), np.zeros(len(contexts), np.int64), np.zeros(len(contexts))
        cache.map_contexts(torch.from_numpy(owner).to(self.device))
        lengths, said = np.array(list(map(len, contexts))), np.zeros((len(contexts), 0), np.int32)
        edges = edges_of(trie).to(self.device)
        for turn in range(trie.longest - 1):  # the last token ends the response
            logprobs = (
                restrict(logits, torch.from_numpy(states)[:, None].to(self.device), edges).log_softmax(-1).cpu().numpy()
            )
            counts = trie.starts[states + 1] - trie.starts[states]
            parents = np.repeat(np.arange(len(states)), counts)
            edge = (
                np.arange(len(parents))
                - np.repeat(np.cumsum(counts) - counts, counts)
                + np.repeat(trie.starts[states], counts)
            )
            totals = scores[parents] + logprobs[parents, trie.tokens[edge]]
            unfinished = trie.next_states[edge] != OVER
            parents, edge, totals = parents[unfinished], edge[unfinished], totals[unfinished]
            yield owner[parents], trie.next_states[edge], totals
            ends = trie.next_states[trie.starts[trie.next_states[edge]]] == OVER
            best = np.flatnonzero(~ends)
            best = best[np.lexsort((-totals[best], owner[parents[best]]))]
            rank = np.arange(len(best)) - np.searchsorted(owner[parents[best]], owner[parents[best]])
            best = best[rank < beam]
            if not len(best):
                return
            rows, tokens = parents[best], trie.tokens[edge[best]]
            cache.branch(torch.from_numpy(rows).to(self.device))
            owner, states, scores = owner[rows], trie.next_states[edge[best]].astype(np.int64), totals[best]
            said = np.concatenate([said[rows], tokens[:, None]], 1, dtype=np.int32)
            positions = torch.from_numpy(lengths[owner] + turn)[:, None].to(self.device)
            logits = self._logits(
                torch.from_numpy(tokens).long()[:, None].to(self.device),
                positions,
                cache.step(turn),
                lambda: [np.concatenate([contexts[i], path]) for i, path in zip(owner.tolist(), said, strict=True)],  # noqa: B023
            ).float()

    def _prefill(self, contexts: Sequence[np.ndarray], attend_of: Callable[[Tensor, Tensor], Attend]) -> Tensor:
        """Compute the contexts with attention by `attend_of(segments, positions)`, which fills a cache; return the
        logits after each, [contexts, V]. Segments are the indices of the contexts."""
        found, first = [], 0
        for group in self._passes(contexts):
            batch = self._packed(group)
            ends = torch.from_numpy(np.cumsum(batch.lengths) - 1).to(self.device)

            def last(x: Tensor, head: Head, ends: Tensor = ends, group: Sequence[np.ndarray] = group) -> Tensor:
                return _logits_of(head, x[0, ends], lambda: group)

            segments = torch.where(batch.segments < 0, -1, batch.segments + first)
            found.append(
                self.model(batch.tokens, batch.positions, segments, last, attend_of(segments, batch.positions))
            )
            first += len(group)
        return torch.cat(found) if len(found) > 1 else found[0]  # cat would copy the one

    def _passes(self, contexts: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
        """Yield the contexts in passes of at most `prefill_tokens` tokens; a longer one has a pass to itself."""
        most, group = self.prefill_tokens or math.inf, list[np.ndarray]()
        for context in contexts:
            if group and sum(map(len, group)) + len(context) > most:
                yield group
                group = []
            group.append(context)
        yield group

    def _logits(
        self, tokens: Tensor, positions: Tensor, attend: Attend, contexts: Callable[[], Sequence[np.ndarray]]
    ) -> Tensor:
        """Return the logits after one token each; `contexts` gives all tokens to there."""
        return self.model(tokens, positions, positions, lambda x, head: _logits_of(head, x[:, 0], contexts), attend)

    def _packed(self, contexts: Sequence[np.ndarray]) -> Batch:
        """Return one packed sequence of these contexts, in which every token has weight 1, padded to
        `prefill_tokens`."""
        units = [(Document(s, np.ones(len(s), np.float32)),) for s in contexts]
        return Batch.of([units], max(sum(map(len, contexts)), self.prefill_tokens or 0)).to(self.device)

    @torch.no_grad()
    def prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See RolloutEngine."""
        found = list[np.ndarray]()
        for group in self._passes(tokens):
            batch = self._packed(group)
            head_fn = partial(token_logprobs, **sampled_from(batch))
            values = self.model(batch.tokens, batch.positions, batch.segments, head_fn).logprobs[0].cpu().numpy()
            found += [values[end - n : end - 1] for n, end in zip(batch.lengths, np.cumsum(batch.lengths), strict=True)]
        return found

    def load_weights(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """See RolloutEngine."""
        with self.stepper.exclusively("load weights"):
            receipt = check(buckets, manifest, self.version)
            if manifest.adapter is not None and self.model.factory.lora is None:
                raise SyncError(
                    f"weight sync {manifest.version} refused: it is an adapter, and this engine's model has none"
                )
            form = self.model.peft() if manifest.adapter is not None else None
            names = form.names() if form else self.model.hf_names()
            if different := names ^ manifest.digests.keys():
                raise SyncError(
                    f"weight sync {manifest.version} refused: the trainer and the engine do not have the same tensors: "
                    f"{sorted(different)[:5]}"
                )
            if isinstance(buckets, Transfer):
                buckets.device = str(self.device)
            tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
            if form:
                form.copy(tensors.__getitem__)
            else:
                self.model.load_hf_tensors(tensors)
            held = form.tensors() if form else self.model.hf_tensors()
            raise_if_other_values(held, tensors, manifest.version)
            self.version = manifest.version
            return receipt

    def sleep(self) -> None:
        """Offload the weights; a cache exists only while there are requests."""
        with self.stepper.exclusively("sleep"):
            self.offloaded.offload([*self.model.parameters(), *self.model.buffers()])

    def wake(self) -> None:
        """See RolloutEngine."""
        self.offloaded.restore()


def _logits_of(head: Any, x: Tensor, contexts: Callable[[], Sequence[np.ndarray]]) -> Tensor:
    """Return the logits of states x [N, D]; a head of its own may compute them from all tokens to each state, too."""
    return head.logits(x, contexts()) if getattr(head, "takes_contexts", False) else head.logits(x)


def served_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """Return the dtype that a model is served in: that of its files, but fp32 on a CPU without units for bf16."""
    stored = model_files.export_dtype(directory)
    if stored == torch.float32 or device.type != "cpu" or multiplies_bf16():
        return stored
    print("this CPU has no units for bf16: the model computes in fp32", flush=True)
    return torch.float32


def raise_if_other_values(held: Iterable[tuple[str, Tensor]], sent: Mapping[str, Tensor], version: int) -> None:
    """Raise SyncError unless each tensor that the engine holds is the one that was sent, in the engine's dtype.

    In bf16 a tensor of the version before is closer than rounding, so no comparison of log-probs can detect it.
    """
    other = [name for name, tensor in held if not torch.equal(tensor, sent[name].to(tensor.device, tensor.dtype))]
    if other:
        raise SyncError(
            f"weight sync {version} failed: after it the engine holds other values than were sent in {len(other)} "
            f"tensors: {sorted(other)[:5]}"
        )
