"""Conformance checks of rollout engines: all that the controller relies on, checked on a small model. They are run on
plugin engines (`ptf check-engine`) and on ptf's own.

The reference is a plain forward pass of ptf's decoder over the tokens that the engine reports. It uses no
caches, batches or fused weights.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ptf.compute.world import World, pick_device
from ptf.config import Plugin
from ptf.config.logprob_limits import LOGPROB_TOLERANCE
from ptf.config.sections.model import ModelConfig
from ptf.data.trajectory import Generation
from ptf.data.trie import Trie
from ptf.model import model_writer
from ptf.model.sampling import ROUNDING, nucleus, restrict
from ptf.rl.engine_settings import EngineSettings
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import Request, RolloutEngine, Sampling, edges_of, generate_all, generation_errors
from ptf.rl.weights.stored import write_buckets
from ptf.rl.weights.verification import Buckets, Manifest, Receipt, SyncError, manifest_of
from ptf.train.trainer import load_model

STOP, LONGEST, MAX_LENGTH = 5, 16, 96
FIRST = 7  # the version of the first sync
FP32_BOUND = 1e-5
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
Make = Callable[[str, int], RolloutEngine]  # from a Hugging Face directory and the version of its weights


class Violation(Exception):
    """The engine does not do what the protocol requires."""


def require(holds: object, otherwise: str) -> None:
    """Raise Violation, with what is wrong otherwise, unless something holds."""
    if not holds:
        raise Violation(otherwise)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    what: str
    wrong: str | None  # None: the engine conforms
    refused: bool = False  # the engine refuses such requests, as it may


def make_of(name: str, args: Sequence[str], precision: str, place: Path) -> Make:
    """Return a function that starts the engine of this name, as in `rollout.engine`.

    `args` are KEY=VALUE arguments of a plugin engine. For vLLM, its environment variables are set in this process.
    """
    kind: str | Plugin = name
    if name not in ("native", "vllm"):
        pairs = [arg.partition("=") for arg in args]
        kind = Plugin(use=name, args={key: yaml.safe_load(value) for key, _, value in pairs})
    if kind == "vllm":
        from ptf.rl.engines.vllm_engine import engine_env

        os.environ.update(engine_env(place / "vllm"))
    world = World(device=pick_device("auto"))
    return lambda directory, version: EngineSettings(
        kind=kind,
        directory=directory,
        version=version,
        seed=0,
        precision=precision,
        max_length=MAX_LENGTH,
        constrained_decoding=True,
    ).start(world)


def small_model(place: Path, seed: int) -> Path:
    """Write a Hugging Face directory with random weights whose responses are far from uniform."""
    source = place / f"config-{seed}"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    model = load_model(source, World(), ModelConfig(path=str(source), init="random"), seed=seed, precision="fp32")
    model_writer.save_hf(model.hf_tensors(), source, place / f"model-{seed}", writes=True)
    return place / f"model-{seed}"


def alternating(first: Sequence[Request], second: Sequence[Request]) -> list[Request]:
    """Return the requests of both in turn, so that a batch has both kinds."""
    return [request for pair in zip(first, second, strict=True) for request in pair]


class ConformanceSuite:
    """The checks of one engine, in order. It is started as in a run, before any sync (version -1).

    The first line of a check's docstring, without "Check that", is what `ptf check-engine` prints.
    """

    def __init__(self, make: Make, place: Path, precision: str = "fp32", timeout_s: float = 300.0) -> None:
        first, second = (small_model(place, seed) for seed in (0, 1))
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.bound = FP32_BOUND if precision == "fp32" else LOGPROB_TOLERANCE[precision]
        self.timeout_s, self.place = timeout_s, place
        self.references = [
            NativeEngine(str(path), device=torch.device("cpu"), dtype=torch.float32, version=0)
            for path in (first, second)
        ]
        self.reference = self.references[0]
        self.engine = make(str(first), -1)
        self.own, self.sent = (
            [sorted((name, tensor.clone()) for name, tensor in reference.model.hf_tensors())]
            for reference in self.references
        )

    def findings(self) -> Iterator[CheckResult]:
        """Yield the result of every check, in order."""
        checks = [
            self.declares,
            self.first_sync,
            self.answers,
            self.logprobs,
            self.nucleus,
            self.allowed,
            self.prompt_logprobs,
            self.seeds,
            self.batch_independence,
            self.greedy,
            self.stops,
            self.limits,
            self.refuses,
            self.second_sync,
            self.sleeps,
        ]
        for check in checks:
            self.refused, wrong = False, None
            try:
                check()
            except Exception as error:
                wrong = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            summary = " ".join((check.__doc__ or "").split()).removeprefix("Check that ").rstrip(".")
            yield CheckResult(summary, wrong, self.refused)

    def ask(
        self,
        n: int = 12,
        temperature: float = 1.0,
        limit: int = LONGEST,
        seed: int = 100,
        stop: tuple[int, ...] = (STOP,),
        top_p: float = 1.0,
        trie: Trie | None = None,
    ) -> list[Request]:
        """Return n requests with random contexts of 2 to 39 tokens."""
        rng, sampling = np.random.default_rng(7), Sampling(limit, temperature, stop, top_p, trie)
        return [
            Request(rng.integers(6, 28, int(rng.integers(2, 40))).astype(np.int32), sampling, seed + i)
            for i in range(n)
        ]

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the engine's responses to requests that are submitted at once."""
        return generate_all(self.engine, requests, self.timeout_s)

    def answered(self, seed: int = 100) -> list[list[int]]:
        """Return the ids of the engine's responses to the requests that are asked again and again."""
        return [generation.sampled_ids.tolist() for generation in self.generate(self.ask(seed=seed))]

    def declares(self) -> None:
        """Check that the engine has a name, declares whether it answers in batches, and holds its first version."""
        require(
            isinstance(self.engine.name, str) and isinstance(self.engine.in_batches, bool),
            "`name` must be a string, `in_batches` true or false",
        )
        require(self.engine.version == -1, f"`version` is {self.engine.version!r}, not -1")

    def first_sync(self) -> None:
        """Check that the first sync may be to any version, as in a run that resumes."""
        manifest = manifest_of(self.own, FIRST)
        self.acknowledged(self.engine.load_weights(self.own, manifest), manifest)

    def acknowledged(self, receipt: Receipt, manifest: Manifest) -> None:
        """Raise Violation unless the engine acknowledges and holds what was sent."""
        right = (manifest.version, len(manifest.digests), manifest.version)
        require(
            (receipt.version, receipt.tensors, self.engine.version) == right,
            f"it acknowledged version {receipt.version} with {receipt.tensors} tensors, "
            f"and holds {self.engine.version}, not {manifest.version}",
        )

    def answers(self) -> None:
        """Check that a response has its context, int32 ids of the vocabulary, and a float32 log-prob and the version of
        each id."""
        for request, generation in zip(requests := self.ask(), self.generate(requests), strict=True):
            kinds = {"context": np.int32, "sampled_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
            for name, kind in kinds.items():
                given = getattr(generation, name).dtype
                require(given == kind, f"{name} is of type {given}, not {np.dtype(kind)}")
            faults = generation_errors(generation, request, self.engine.version, CONFIG["vocab_size"])
            require(not faults, f"it answered with {' and '.join(faults)}")

    def logprobs(self) -> None:
        """Check that log-probs are those of the distribution that was sampled from, after temperature."""
        for temperature in (1.0, 0.7, 1.3):
            self.compare(self.ask(temperature=temperature))

    def nucleus(self) -> None:
        """Check that with `top_p` only the likeliest tokens are sampled, with log-probs among them, or that such a
        request is refused (ValueError)."""
        if self.serves(requests := self.ask(temperature=1.3, top_p=0.8)):
            self.compare(requests)

    def allowed(self) -> None:
        """Check that with a trie only its responses are generated, sampled or greedy, with log-probs among the allowed
        tokens, or that such a request is refused."""
        answers = [[7, 8], [7, 9, 10], [11], [12, 13, 14, 15], [12, 16]]
        trie, twice = Trie.of(answers, (STOP,)), Trie.of(answers, (STOP,), 2, distinct=True)
        if not self.serves(self.ask(trie=trie)):
            return
        for temperature, allowed in itertools.product((1.0, 0.7, 0.0), (trie, twice)):
            requests = self.ask(temperature=temperature, trie=allowed, limit=allowed.longest)
            for generation in self.generate(requests):
                try:
                    allowed.walked(generation.sampled_ids)
                except ValueError as error:
                    raise Violation(
                        f"it answered {generation.sampled_ids.tolist()}, which is not allowed: {error}"
                    ) from None
                require(generation.finished, f"it answered {generation.sampled_ids.tolist()}, and did not end it")
            self.compare(requests)
        self.compare(alternating(self.ask(6, trie=trie), self.ask(6, seed=300)))

    def serves(self, requests: Sequence[Request]) -> bool:
        """Return False if the engine refuses these requests."""
        try:
            self.generate(requests)
        except ValueError:
            self.refused = True
            return False
        return True

    def compare(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the responses. Raises Violation if their log-probs differ from the reference's."""
        generations = self.generate(requests)
        for request, generation in zip(requests, generations, strict=True):
            sampling, ids = request.sampling, generation.sampled_ids
            logprobs, slack = self.reference_logprobs(generation, sampling)
            difference = np.abs(logprobs[np.arange(len(ids)), ids] - generation.logprobs) - slack
            worst = float(difference.max())
            require(
                worst <= self.bound,
                f"a sampled token's log-prob differs by {worst:.3g} from ptf's decoder's (bound {self.bound:g}; "
                f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
                f"{', a trie' if sampling.trie else ''})",
            )
        return generations

    @torch.no_grad()
    def reference_logprobs(self, generation: Generation, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of all tokens at each position, float64 [n, V], and how far rounding may move them, [n].

        Rounding moves them where it decides which tokens belong to the nucleus.
        """
        batch = self.reference._packed([np.concatenate([generation.context, generation.sampled_ids])])
        every = self.reference.model(batch.tokens, batch.positions, batch.segments, lambda x, head: head.logits(x[0]))
        logits = every[len(generation.context) - 1 : -1]  # [n, V]
        if sampling.trie is not None:
            states = torch.from_numpy(sampling.trie.walked(generation.sampled_ids)).long()
            restrict(logits, states, edges_of(sampling.trie))
        logprobs = (logits.double() / (sampling.temperature or 1.0)).log_softmax(-1)
        slack = torch.zeros(len(logprobs))
        if sampling.top_p < 1 and sampling.temperature:
            slack = nucleus(
                logprobs, sampling.top_p, torch.from_numpy(generation.sampled_ids).long(), ROUNDING[self.dtype]
            )
        return logprobs.numpy(), slack.numpy()

    def prompt_logprobs(self) -> None:
        """Check that `prompt_logprobs` gives the log-probs of all tokens but the first, at temperature 1."""
        contexts = [request.context for request in self.ask() if len(request.context) > 2]
        for ours, theirs in zip(
            self.reference.prompt_logprobs(contexts), self.engine.prompt_logprobs(contexts), strict=True
        ):
            require(
                len(ours) == len(theirs) and np.abs(ours - theirs).max() <= self.bound,
                "a log-prob of `prompt_logprobs` differs from that of ptf's decoder",
            )

    def seeds(self) -> None:
        """Check that the same seed gives the same response, and another seed another response."""
        first, second, other = (self.answered(seed) for seed in (100, 100, 900))
        require(first == second, "the same request was answered in two ways")
        require(not all(a == b for a, b in zip(first, other, strict=True)), "other seeds gave the same responses")

    def batch_independence(self) -> None:
        """Check that a response does not depend on what else is in the batch."""
        for request, together in zip(self.ask()[::3], self.answered()[::3], strict=True):
            (single,) = self.generate([request])
            require(
                single.sampled_ids.tolist() == together,
                "the output of a request depends on the other requests in its batch",
            )

    def greedy(self) -> None:
        """Check that at temperature 0 the likeliest token is taken, also beside requests that sample."""
        for generation in self.compare(alternating(self.ask(6, temperature=0.0), self.ask(6, seed=300)))[::2]:
            logprobs, _ = self.reference_logprobs(generation, Sampling(LONGEST, 0.0, (STOP,)))
            taken = logprobs[np.arange(len(generation.sampled_ids)), generation.sampled_ids]
            gap = float((logprobs.max(1) - taken).max())
            require(gap <= self.bound, f"it took a token that is {gap:.3g} less likely than the likeliest")

    def stops(self) -> None:
        """Check that a stop token ends a response and is part of it, and that nothing else ends one early."""
        generations = self.generate(self.ask(24, stop=(STOP, 9, 10, 11, 12)))
        for generation in generations:
            is_stop = np.isin(generation.sampled_ids, (STOP, 9, 10, 11, 12))
            require(
                not is_stop[:-1].any() and generation.finished == bool(is_stop[-1]),
                "a response continues after a stop token, or `finished` is wrong",
            )
            require(
                generation.finished or len(generation.sampled_ids) == LONGEST,
                f"a response of {len(generation.sampled_ids)} tokens ended without a stop token; "
                f"the limit was {LONGEST}",
            )
        require(
            any(generation.finished for generation in generations),
            "none of 24 responses ended with one of five stop tokens",
        )

    def limits(self) -> None:
        """Check that each request of a batch has its own `max_new_tokens`."""
        requests = [Request(r.context, Sampling(1 + i, 1.0, ()), r.seed) for i, r in enumerate(self.ask())]
        for request, generation in zip(requests, self.generate(requests), strict=True):
            require(
                len(generation.sampled_ids) == request.sampling.max_new_tokens,
                "a response is longer or shorter than its limit",
            )

    def refuses(self) -> None:
        """Check that weights that are stale, missing, garbled, swapped, duplicate or not announced are refused, and
        that the engine keeps those that it had."""
        before = self.answered()
        for fault, (buckets, manifest) in self.corrupted_syncs().items():
            try:
                self.engine.load_weights(buckets, manifest)
            except SyncError:
                pass
            else:
                raise Violation(f"it took weights that were {fault}")
            require(
                self.engine.version == FIRST and self.answered() == before,
                f"it refused weights that were {fault}, but answers otherwise than before",
            )

    def corrupted_syncs(self) -> dict[str, tuple[Buckets, Manifest]]:
        """Return syncs that must be refused, by what is wrong with them."""
        pairs = [pair for bucket in self.sent for pair in bucket]
        right, (name, tensor) = manifest_of(self.sent, FIRST + 1), pairs[0]
        (a, one), (b, other) = next(
            (one, other)
            for one, other in itertools.combinations(pairs, 2)
            if one[1].shape == other[1].shape and not torch.equal(one[1], other[1])
        )
        swapped = [*(pair for pair in pairs if pair[0] not in (a, b)), (a, other), (b, one)]
        garbled = tensor.clone()
        garbled.view(-1)[0] += 1
        return {
            "stale": (self.sent, manifest_of(self.sent, FIRST)),
            "two versions on": (self.sent, manifest_of(self.sent, FIRST + 2)),
            "incomplete": ([pairs[1:]], right),
            "garbled": ([[(name, garbled), *pairs[1:]]], right),
            "swapped": ([swapped], right),
            "duplicate": ([[pairs[0], *pairs]], right),
            "not announced": ([pairs], Manifest(FIRST + 1, {k: v for k, v in right.digests.items() if k != name})),
        }

    def second_sync(self) -> None:
        """Check that after a sync, which may be in files, the new weights and version are used, and no old prefix."""
        old = self.answered()
        pairs = (pair for bucket in self.sent for pair in bucket)
        buckets, manifest = write_buckets(pairs, self.place / "sync", FIRST + 1, limit=1 << 14)
        self.acknowledged(self.engine.load_weights(buckets, manifest), manifest)
        self.reference = self.references[1]
        generations = self.compare(self.ask())
        require([one.sampled_ids.tolist() for one in generations] != old, "it answers as before the sync")
        require(
            all(set(one.versions.tolist()) == {FIRST + 1} for one in generations),
            "its tokens have another version than that of the sync",
        )

    def sleeps(self) -> None:
        """Check that the engine answers the same after sleeping and waking."""
        before = self.answered()
        self.engine.sleep()
        self.engine.wake()
        require(self.answered() == before, "its greedy outputs changed after sleep and wake")
