"""Generation with ptf's own Decoder: for CPUs without vLLM, and for models that vLLM does not support.

All waiting requests are answered as one batch over a static key-value cache; equal contexts (those of the samples of
one prompt) are computed once. A request has its own generator of random numbers, so its answer does not depend on its
batch.
"""

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ptf.compute.offload import OffloadedTensors
from ptf.data.batch import Batch
from ptf.data.sample import Sample
from ptf.data.trajectory import Generation
from ptf.data.trie import OVER, Trie, TrieCursor
from ptf.model import bridge
from ptf.model.attention import Attend
from ptf.model.chunked import token_logprobs
from ptf.model.head import Head
from ptf.model.layers import LayerFactory
from ptf.model.peft_format import PeftFormat
from ptf.model.sampling import nucleus, restrict
from ptf.rl.engines.kv_cache import Cache
from ptf.rl.engines.protocol import Request, edges_of
from ptf.rl.weights.streamed import Transfer
from ptf.rl.weights.verification import Buckets, Manifest, Receipt, SyncError, check

BATCH = 1024  # requests that are answered at once


class NativeEngine:
    """RolloutEngine on ptf's own Decoder."""

    name = "native"
    in_batches = True

    def __init__(
        self,
        directory: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        version: int,
        batch: int = BATCH,
        factory: LayerFactory | None = None,
        seed: int = 0,
        offload_file: Path | None = None,
    ) -> None:
        self.model, self.family = bridge.build(Path(directory), head="lm", factory=factory)
        bridge.materialize(self.model, device)
        bridge.load_hf(self.model, Path(directory), self.family, seed)
        self.model.to(dtype).requires_grad_(False).eval()
        self.device, self.dtype, self.version, self.batch = device, dtype, version, batch
        self.offloaded = OffloadedTensors(offload_file)
        self.waiting: list[tuple[Request, asyncio.Future[Generation]]] = []

    async def generate(self, request: Request) -> Generation:
        """See RolloutEngine."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, answer))
        await asyncio.sleep(0)  # let the other callers queue their requests; the first to continue serves them all
        while self.waiting and not answer.done():
            batch, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
            try:
                generations = self.answer([r for r, _ in batch])
                if len(generations) != len(batch):
                    raise RuntimeError(
                        f"the rollout engine {self.name} gave {len(generations)} answers to {len(batch)} requests"
                    )
                for (_, future), generation in zip(batch, generations, strict=True):
                    future.set_result(generation)
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
        return await answer

    @torch.no_grad()
    def answer(self, requests: Sequence[Request]) -> list[Generation]:
        """Answer a batch of requests to the end."""
        contexts = {r.context.tobytes(): r.context for r in requests}
        index = {key: i for i, key in enumerate(contexts)}
        limits = np.array([r.sampling.max_new_tokens for r in requests])
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype  # attention over it is computed in fp32
        cache = Cache(
            self.model.config, [len(context) for context in contexts.values()], int(limits.max()), self.device, dtype
        )
        logits = self._prefill(list(contexts.values()), cache)  # [contexts, V]
        which = torch.tensor([index[r.context.tobytes()] for r in requests], device=self.device)
        cache.map_contexts(which)
        logits = logits[which]

        n = len(requests)
        temperature = torch.tensor([r.sampling.temperature for r in requests], device=self.device)
        top_p = torch.tensor(
            [r.sampling.top_p if r.sampling.temperature else 1.0 for r in requests], device=self.device
        )
        allowed = TrieStates(requests, self.device)
        lengths = torch.tensor([len(r.context) for r in requests], device=self.device)
        draws = _draws(requests).to(self.device)
        stops = [frozenset(r.sampling.stop) for r in requests]
        sampled: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        stopped = np.zeros(n, bool)
        live = np.arange(n)  # the request that each row of the cache belongs to
        for turn in range(int(limits.max())):
            rows = torch.from_numpy(live).to(self.device)
            tokens, chosen = _draw(allowed.restrict(logits, live), temperature[rows], top_p[rows], draws[rows, turn])
            allowed.follow(live, tokens)
            for i, token, logprob in zip(live.tolist(), tokens.tolist(), chosen.tolist(), strict=True):
                sampled[i].append(token)
                logprobs[i].append(logprob)
                stopped[i] = token in stops[i]
            unfinished = ~stopped[live] & (turn + 1 < limits[live])
            if not unfinished.any():
                break
            if not unfinished.all():
                kept = torch.from_numpy(np.flatnonzero(unfinished)).to(self.device)
                cache.keep(kept)
                live, rows, tokens = live[unfinished], rows[kept], tokens[kept]
            positions = (lengths[rows] + turn)[:, None]
            logits = self._logits(tokens[:, None], positions, cache.step(turn))
        return [
            Generation(
                r.context,
                np.array(s, np.int32),
                np.array(p, np.float32),
                np.full(len(s), self.version, np.int32),
                bool(done),
            )
            for r, s, p, done in zip(requests, sampled, logprobs, stopped, strict=True)
        ]

    @torch.no_grad()
    def levels(
        self, contexts: Sequence[np.ndarray], trie: Trie, beam: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Search the trie's answers to each context by beam search, and yield the candidates of each length.

        Candidates are all continuations, by one token, of the `beam` likeliest beginnings; yielded are the index of
        their context, the trie's state after them, and their log-probability among the allowed answers, [n] each.
        """
        cache = Cache(self.model.config, list(map(len, contexts)), max(trie.longest - 1, 1), self.device, torch.float32)
        logits = self._prefill(contexts, cache).float()
        owner, states, scores = np.arange(len(contexts)), np.zeros(len(contexts), np.int64), np.zeros(len(contexts))
        cache.map_contexts(torch.from_numpy(owner).to(self.device))
        lengths = np.array(list(map(len, contexts)))
        edges = edges_of(trie).to(self.device)
        for turn in range(trie.longest - 1):  # the last token ends the answer
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
            positions = torch.from_numpy(lengths[owner] + turn)[:, None].to(self.device)
            logits = self._logits(
                torch.from_numpy(tokens).long()[:, None].to(self.device), positions, cache.step(turn)
            ).float()

    def _prefill(self, contexts: Sequence[np.ndarray], cache: Cache) -> Tensor:
        """Compute the contexts into the cache; return the logits after each, [contexts, V]."""
        batch = self._packed(contexts)
        ends = torch.from_numpy(np.cumsum(batch.lengths) - 1).to(self.device)

        def last(x: Tensor, head: Head) -> Tensor:
            return head.logits(x[0, ends])

        return self.model(
            batch.tokens, batch.positions, batch.segments, last, cache.prefill(batch.segments, batch.positions)
        )

    def _logits(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.model(tokens, positions, positions, lambda x, head: head.logits(x[:, 0]), attend)

    def _packed(self, sequences: Sequence[np.ndarray]) -> Batch:
        """Return one packed sequence of these documents, in which every token has weight 1."""
        units = [(Sample(s, np.ones(len(s), np.float32)),) for s in sequences]
        return Batch.of([units], sum(map(len, sequences))).to(self.device)

    @torch.no_grad()
    def prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See RolloutEngine."""
        batch = self._packed(tokens)

        def head_fn(x, head):
            return token_logprobs(x, head, batch.targets, batch.loss_weights, selected=batch.trained_positions).logprobs

        values = self.model(batch.tokens, batch.positions, batch.segments, head_fn)[0].cpu().numpy()
        starts = np.cumsum([0, *batch.lengths])
        return [values[a : b - 1] for a, b in itertools.pairwise(starts)]

    def load_weights(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """See RolloutEngine."""
        receipt = check(buckets, manifest, self.version)
        if manifest.adapter is not None and self.model.factory.lora is None:
            raise SyncError(
                f"weight sync {manifest.version} refused: it is an adapter, and this engine's model has none"
            )
        form = PeftFormat(self.model, self.family) if manifest.adapter is not None else None
        names = form.names() if form else bridge.hf_names(self.model, self.family)
        if different := names ^ manifest.digests.keys():
            raise SyncError(
                f"weight sync {manifest.version} refused: the trainer and the engine do not have the same tensors: "
                f"{sorted(different)[:5]}"
            )
        if isinstance(buckets, Transfer):
            buckets.device = str(self.device)
        tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
        if isinstance(buckets, Transfer):
            receipt = buckets.receipt()
        if form:
            form.copy(tensors.__getitem__)
        else:
            bridge.load_hf_tensors(self.model, tensors, self.family)
        held = form.tensors() if form else bridge.hf_tensors(self.model, self.family)
        raise_if_other_values(held, tensors, manifest.version)
        self.version = manifest.version
        return receipt

    def sleep(self) -> None:
        """Offload the weights; the cache exists only inside a batch."""
        self.offloaded.offload([*self.model.parameters(), *self.model.buffers()])

    def wake(self) -> None:
        """See RolloutEngine."""
        self.offloaded.restore()


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


def _draws(requests: Sequence[Request]) -> Tensor:
    """Return uniform random numbers in [0, 1), float64 [requests, longest answer], from each request's own seed."""
    draws = torch.zeros(len(requests), max(r.sampling.max_new_tokens for r in requests), dtype=torch.float64)
    for row, r in zip(draws, requests, strict=True):
        n = r.sampling.max_new_tokens
        row[:n] = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(r.seed))
    return draws


class TrieStates:
    """The position of each of n requests in its trie, if it has one."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.tries = [r.sampling.trie for r in requests]
        self.edges = {trie: edges_of(trie).to(device) for trie in self.tries if trie is not None}
        self.walks = [None if trie is None else TrieCursor(trie) for trie in self.tries]

    def restrict(self, logits: Tensor, live: np.ndarray) -> Tensor:
        """Restrict the logits, [n, V], of the live requests to the allowed tokens, in place."""
        for trie, edges in self.edges.items():
            rows = [i for i, request in enumerate(live) if self.tries[request] is trie]
            if rows:
                states = torch.tensor([self.walks[live[i]].place() for i in rows], device=logits.device)
                logits[rows] = restrict(logits[rows], states, edges)
        return logits

    def follow(self, live: np.ndarray, tokens: Tensor) -> None:
        """Move each live request along its token."""
        if self.edges:
            for request, token in zip(live, tokens.tolist(), strict=True):
                if (walk := self.walks[request]) is not None:
                    walk.follow(token)


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token for each row of logits, [n, V], by inverse transform of `draws` in [0, 1).

    Temperature 0 takes the likeliest token. Returns tokens [n] and their log-probs [n].
    """
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    if (top_p < 1).any():
        nucleus(logprobs, top_p)
    total = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = (
        torch.searchsorted(total, (draws * total[:, -1])[:, None], right=True)
        .squeeze(1)
        .clamp_(max=logits.shape[1] - 1)
    )
    tokens = torch.where(greedy, logits.argmax(-1), drawn) if greedy.any() else drawn
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
