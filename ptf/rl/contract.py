"""What the controller relies on in a rollout engine, checked one by one on a small model: for engines of your own (`ptf check-engine`), and for ours.

The one idea: the judge is our decoder's plain forward pass over what the engine says it sampled. It knows nothing of caches, batches or fused weights.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from ptf.compute.world import World, pick_device
from ptf.config import Plug
from ptf.config.schema import LOGPROB_BOUND, ModelConfig
from ptf.data.trajectory import Call
from ptf.data.trie import Trie
from ptf.model import bridge
from ptf.model.sampling import ROUNDING, nucleus, restrict
from ptf.rl.engine import Request, RolloutEngine, Sampling, edges_of, generate_all
from ptf.rl.native_engine import NativeEngine
from ptf.rl.roles import make_engine
from ptf.rl.sync import Buckets, Manifest, Receipt, SyncError, bucketed, manifest_of, written
from ptf.train.trainer import load_model

STOP, LONGEST, MAX_LENGTH = 5, 16, 96
FIRST = 7  # the version of the first sync
FP32_BOUND = 1e-5
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "attention_bias": False,
    "max_position_embeddings": 128, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
Make = Callable[[str, int], RolloutEngine]  # from a Hugging Face directory and the version of its weights


class Broken(Exception):
    """The engine does not do what it must."""


@dataclass(frozen=True)
class Finding:
    what: str
    wrong: str | None  # None: it does
    refused: bool = False  # it says that it cannot, and need not


def make_of(name: str, args: Sequence[str], precision: str, place: Path) -> Make:
    """By the name that `rollout.engine` has, and KEY=VALUE arguments of one of your own. vLLM gets the environment that it needs, in this process."""
    kind: str | Plug = name if name in ("native", "vllm") else Plug(use=name, args={a.partition("=")[0]: yaml.safe_load(a.partition("=")[2]) for a in args})
    if kind == "vllm":
        from ptf.rl.vllm_engine import engine_env

        os.environ.update(engine_env(place / "vllm"))
    world = World(device=pick_device("auto"))
    more = {"restricted": True} if kind == "vllm" else {}
    return lambda directory, version: make_engine(kind, directory, world, version=version, seed=0, precision=precision, max_length=MAX_LENGTH, **more)


def small_model(place: Path, seed: int) -> Path:
    """A Hugging Face directory with random weights whose answers are far from uniform."""
    source = place / f"config-{seed}"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    model, family = load_model(source, World(), ModelConfig(path=str(source), init="random"), seed=seed, precision="fp32")
    bridge.save_hf(bridge.hf_tensors(model, family), source, place / f"model-{seed}", writes=True)
    return place / f"model-{seed}"


class Contract:
    """One engine, made once as a run does it, before any sync (version -1), and what is asked of it in order."""

    def __init__(self, make: Make, place: Path, precision: str = "fp32", timeout_s: float = 300.0) -> None:
        first, second = (small_model(place, seed) for seed in (0, 1))
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.bound = FP32_BOUND if precision == "fp32" else LOGPROB_BOUND[precision]
        self.timeout_s, self.place, self.refused = timeout_s, place, False
        self.judges = [NativeEngine(str(path), device=torch.device("cpu"), dtype=torch.float32, version=0) for path in (first, second)]
        self.judge = self.judges[0]
        self.engine = make(str(first), -1)
        self.own, self.sent = (list(bucketed(sorted((n, t.clone()) for n, t in bridge.hf_tensors(j.model, j.family)))) for j in self.judges)

    def findings(self) -> Iterator[Finding]:
        """Every check, in order; after the weights have been found wrong, what follows is not checked."""
        checks = [
            self.declared, self.begins, self.answers, self.logprobs, self.nucleus, self.allowed, self.scores, self.seeds, self.alone, self.greedy,
            self.stops, self.limits, self.refuses, self.moves_on, self.sleeps,
        ]  # fmt: skip
        for check in checks:
            wrong = None
            try:
                check()
            except Broken as error:
                wrong = str(error)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            refused, self.refused = self.refused, False
            yield Finding(" ".join((check.__doc__ or "").split()).rstrip("."), wrong, refused)

    def ask(
        self, n: int = 12, temperature: float = 1.0, limit: int = LONGEST, seed: int = 100, stop: tuple[int, ...] = (STOP,), top_p: float = 1.0,
        trie: Trie | None = None,
    ) -> list[Request]:  # fmt: skip
        rng, how = np.random.default_rng(7), Sampling(limit, temperature, stop, top_p, trie)
        return [Request(rng.integers(6, 28, int(rng.integers(2, 40))).astype(np.int32), how, seed + i) for i in range(n)]

    def told(self, requests: Sequence[Request]) -> list[Call]:
        return generate_all(self.engine, requests, self.timeout_s)

    def declared(self) -> None:
        """It has a name, says whether it answers in batches, and holds the version that it was made with."""
        if not isinstance(self.engine.name, str) or not isinstance(self.engine.in_batches, bool):
            raise Broken("`name` must be a string, `in_batches` true or false")
        if self.engine.version != -1:
            raise Broken(f"`version` is {self.engine.version!r}, not -1")

    def begins(self) -> None:
        """The first sync may be to any version, as in a run that resumes."""
        receipt = self.engine.load_weights(self.own, manifest := manifest_of(self.own, FIRST))
        self.acknowledged(receipt, manifest)

    def acknowledged(self, receipt: Receipt, manifest: Manifest) -> None:
        if (receipt.version, receipt.tensors) != (manifest.version, len(manifest.digests)) or self.engine.version != manifest.version:
            raise Broken(f"it acknowledged version {receipt.version} with {receipt.tensors} tensors, and holds {self.engine.version}, not {manifest.version}")

    def answers(self) -> None:
        """An answer has its context, int32 ids, a float32 log-prob and the version for each."""
        for request, call in zip(requests := self.ask(), self.told(requests), strict=True):
            kinds = {"context": np.int32, "sampled": np.int32, "logprobs": np.float32, "versions": np.int32}
            if wrong := [name for name, kind in kinds.items() if getattr(call, name).dtype != kind]:
                raise Broken(f"{wrong[0]} is of type {getattr(call, wrong[0]).dtype}, not {np.dtype(kinds[wrong[0]])}")
            if not np.array_equal(call.context, request.context):
                raise Broken("an answer has another request's context")
            if not 1 <= len(call.sampled) == len(call.logprobs) == len(call.versions):
                raise Broken(f"{len(call.sampled)} ids with {len(call.logprobs)} log-probs and {len(call.versions)} versions")
            if set(call.versions.tolist()) != {self.engine.version}:
                raise Broken(f"tokens are stamped {sorted(set(call.versions.tolist()))}, the engine's version is {self.engine.version}")

    def logprobs(self) -> None:
        """Log-probs are those of the distribution that was sampled from, after temperature."""
        for temperature in (1.0, 0.7, 1.3):
            self.compare(self.ask(temperature=temperature))

    def nucleus(self) -> None:
        """With `top_p`, only the likeliest tokens are drawn, and log-probs are those among them; or such a request is refused (ValueError)."""
        if self.serves(requests := self.ask(temperature=1.3, top_p=0.8)):
            self.compare(requests)

    def allowed(self) -> None:
        """With a trie, only its answers are given, drawn or greedy, and log-probs are those among what may follow; or such a request is refused."""
        answers = [[7, 8], [7, 9, 10], [11], [12, 13, 14, 15], [12, 16]]
        trie, twice = Trie.of(answers, (STOP,)), Trie.of(answers, (STOP,), 2, distinct=True)
        if not self.serves(self.ask(trie=trie)):
            return
        for temperature, given in itertools.product((1.0, 0.7, 0.0), (trie, twice)):
            for call in self.told(requests := self.ask(temperature=temperature, trie=given, limit=given.longest)):
                try:
                    given.walked(call.sampled)
                except ValueError as error:
                    raise Broken(f"it answered {call.sampled.tolist()}, which is not allowed: {error}") from None
                if not call.finished:
                    raise Broken(f"it answered {call.sampled.tolist()}, and did not end it")
            self.compare(requests)
        self.compare([r for pair in zip(self.ask(6, trie=trie), self.ask(6, seed=300), strict=True) for r in pair])  # beside others

    def serves(self, requests: Sequence[Request]) -> bool:
        """False if it refuses them."""
        try:
            self.told(requests)
        except ValueError:
            self.refused = True
            return False
        return True

    def compare(self, requests: Sequence[Request]) -> list[Call]:
        """What it answers. Raises Broken if log-probs are wrong."""
        calls = self.told(requests)
        for request, call in zip(requests, calls, strict=True):
            how, (logprobs, slack) = request.sampling, self.judged(call, request.sampling)
            apart = np.abs(logprobs[np.arange(len(call.sampled)), call.sampled] - call.logprobs) - slack
            if not (worst := float(apart.max())) <= self.bound:
                given = f"temperature {how.temperature:g}, top_p {how.top_p:g}{', a trie' if how.trie else ''}"
                raise Broken(f"a sampled token's log-prob differs by {worst:.3g} from our decoder's (bound {self.bound:g}; {given})")
        return calls

    @torch.no_grad()
    def judged(self, call: Call, how: Sampling) -> tuple[np.ndarray, np.ndarray]:
        """[n, V] float64, log-probs of what might have been sampled at each place, and [n] what rounding may make of them."""
        ids = np.concatenate([call.context, call.sampled])
        batch = self.judge._packed([ids])
        logits = self.judge.model(batch.tokens, batch.positions, batch.segments, lambda x, head: head.logits(x[0]))[len(call.context) - 1 : -1]  # [n, V]
        if how.trie is not None:
            restrict(logits, torch.from_numpy(how.trie.walked(call.sampled)).long(), edges_of(how.trie))
        logprobs = (logits.double() / (how.temperature or 1.0)).log_softmax(-1)
        slack = torch.zeros(len(logprobs))
        if how.top_p < 1 and how.temperature:
            slack = nucleus(logprobs, how.top_p, torch.from_numpy(call.sampled).long(), ROUNDING[self.dtype])
        return logprobs.numpy(), slack.numpy()

    def scores(self) -> None:
        """`score` gives log-probs of all tokens but the first, at temperature 1."""
        sequences = [request.context for request in self.ask() if len(request.context) > 2]
        for ours, theirs in zip(self.judge.score(sequences), self.engine.score(sequences), strict=True):
            if len(ours) != len(theirs) or not np.abs(ours - theirs).max() <= self.bound:
                raise Broken("a score differs from our decoder's")

    def seeds(self) -> None:
        """The same seed gives the same answer, another another."""
        first, again, other = (self.told(self.ask(seed=seed)) for seed in (100, 100, 900))
        if any(not np.array_equal(a.sampled, b.sampled) for a, b in zip(first, again, strict=True)):
            raise Broken("the same request was answered in two ways")
        if all(np.array_equal(a.sampled, b.sampled) for a, b in zip(first, other, strict=True)):
            raise Broken("other seeds gave the same answers")

    def alone(self) -> None:
        """An answer does not depend on what else is in the batch."""
        together = self.told(self.ask())
        for request, call in zip(self.ask()[::3], together[::3], strict=True):
            (single,) = self.told([request])
            if not np.array_equal(single.sampled, call.sampled):
                raise Broken("a request was answered otherwise by itself than among others")

    def greedy(self) -> None:
        """At temperature 0 it takes the likeliest token, also beside requests that sample."""
        for call in self.compare([r for pair in zip(self.ask(6, temperature=0.0), self.ask(6, seed=300), strict=True) for r in pair])[::2]:
            judged, _ = self.judged(call, Sampling(LONGEST, 0.0, (STOP,)))
            gap = float((judged.max(1) - judged[np.arange(len(call.sampled)), call.sampled]).max())
            if gap > self.bound:
                raise Broken(f"it took a token that is {gap:.3g} less likely than the likeliest")

    def stops(self) -> None:
        """A stop token ends an answer and is part of it; nothing else ends one early."""
        calls = self.told(self.ask(24, stop=(STOP, 9, 10, 11, 12)))
        for call in calls:
            there = np.isin(call.sampled, (STOP, 9, 10, 11, 12))
            if there[:-1].any() or call.finished != bool(there[-1]):
                raise Broken("an answer goes on after a stop token, or says wrongly whether one ended it")
            if not call.finished and len(call.sampled) != LONGEST:
                raise Broken(f"an answer of {len(call.sampled)} tokens ended without a stop token; the limit was {LONGEST}")
        if not any(call.finished for call in calls):
            raise Broken("no answer of 24 came to one of five stop tokens")

    def limits(self) -> None:
        """`max_new_tokens` is kept by each request of a batch for itself."""
        asked = [Request(r.context, Sampling(1 + i, 1.0, ()), r.seed) for i, r in enumerate(self.ask())]
        if any(len(call.sampled) != request.sampling.max_new_tokens for request, call in zip(asked, self.told(asked), strict=True)):
            raise Broken("an answer is longer or shorter than its limit")

    def refuses(self) -> None:
        """Weights that are stale, missing, garbled, swapped, twice there or not announced are refused, and what it had stays."""
        before = [call.sampled.tolist() for call in self.told(self.ask())]
        for fault, (buckets, manifest) in self.faults().items():
            try:
                self.engine.load_weights(buckets, manifest)
            except SyncError:
                pass
            else:
                raise Broken(f"it took weights that were {fault}")
            if self.engine.version != FIRST or [call.sampled.tolist() for call in self.told(self.ask())] != before:
                raise Broken(f"it refused weights that were {fault}, but answers otherwise than before")

    def faults(self) -> dict[str, tuple[Buckets, Manifest]]:
        pairs = [pair for bucket in self.sent for pair in bucket]
        right, (name, tensor) = manifest_of(self.sent, FIRST + 1), pairs[0]
        alike = lambda a, b: a.shape == b.shape and not torch.equal(a, b)  # noqa: E731
        i, j = next((i, j) for j in range(len(pairs)) for i in range(j) if alike(pairs[i][1], pairs[j][1]))
        swapped = list(pairs)
        swapped[i], swapped[j] = (pairs[i][0], pairs[j][1]), (pairs[j][0], pairs[i][1])
        garbled = tensor.clone()
        garbled.view(-1)[0] += 1
        return {
            "stale": (self.sent, manifest_of(self.sent, FIRST)), "two versions on": (self.sent, manifest_of(self.sent, FIRST + 2)),
            "incomplete": ([pairs[1:]], right), "garbled": ([[(name, garbled), *pairs[1:]]], right), "swapped": ([swapped], right),
            "twice there": ([[pairs[0], *pairs]], right),
            "not announced": ([pairs], Manifest(FIRST + 1, {k: v for k, v in right.digests.items() if k != name})),
        }  # fmt: skip

    def moves_on(self) -> None:
        """After a sync, which may come in files, it computes with the new weights, and stamps the new version; nothing is left of old prefixes."""
        old = [call.sampled.tolist() for call in self.told(self.ask())]
        buckets, manifest = written((pair for bucket in self.sent for pair in bucket), self.place / "sync", FIRST + 1, limit=1 << 14)
        self.acknowledged(self.engine.load_weights(buckets, manifest), manifest)
        self.judge = self.judges[1]
        calls = self.compare(self.ask())
        if [call.sampled.tolist() for call in calls] == old or any(set(call.versions.tolist()) != {FIRST + 1} for call in calls):
            raise Broken("it answers as before the sync, or stamps another version")

    def sleeps(self) -> None:
        """After sleeping and waking it answers as before."""
        before = [call.sampled.tolist() for call in self.told(self.ask())]
        self.engine.sleep()
        self.engine.wake()
        if [call.sampled.tolist() for call in self.told(self.ask())] != before:
            raise Broken("it answers otherwise")
