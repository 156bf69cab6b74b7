"""The vLLM engine computes what transformers computes, before and after every weight sync,
and refuses to generate from anything else.

Two engines in processes of their own: one with a head tied to the embedding (vLLM's own reload leaves that head stale),
one without.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ptf.compute.world import World
from ptf.rl.cluster import Pool, RoleSpec, split_over_workers
from ptf.rl.engines.protocol import Request, Sampling, generate_all
from ptf.rl.engines.vllm_engine import VLLMEngine, engine_env
from ptf.rl.weights.verification import Buckets, Manifest, SyncError, manifest_of
from tests import tiny

pytestmark = [pytest.mark.ray, pytest.mark.long]
KINDS = ("tied", "untied")
# the vocabulary is no multiple of 64, to which vLLM pads it; 400 tokens are three blocks of its prefix cache
VOCAB, EOS, LONGEST = 97, 7, 400


class EngineRole:
    """Holds one engine, and lets a test do anything with it."""

    uses_process_group: ClassVar[bool] = False

    def __init__(self, world: World, path: str) -> None:
        self.engine = VLLMEngine(path, seed=0, dtype="float32", max_model_len=LONGEST, cpu_kv_cache_gib=0.1)

    @split_over_workers
    def do(self, work: list[tuple[Callable[..., Any], tuple[Any, ...]] | None]) -> list[Any]:
        return [item and item[0](self.engine, *item[1]) for item in work]


def checkpoint(directory: Path, kind: str, seed: int) -> Path:
    """A checkpoint whose generation_config asks for what must not happen: another stop, another temperature, top-k."""
    sizes = {"max_position_embeddings": 512, "eos_token_id": EOS}
    path = tiny.checkpoint(directory / f"{kind}{seed}", tied=kind == "tied", seed=seed, **sizes)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": EOS, "temperature": 0.1, "top_k": 2, "do_sample": True})
    )
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def engines(ray_cluster, place, vllm_caches):
    from ptf.rl.ray_cluster import VerlCluster

    (place / "home").mkdir()
    cluster = VerlCluster(device="cpu", timeout_s=400, pools=[Pool("engines", frozenset(KINDS), (2,))])
    env = {**engine_env(vllm_caches), "HOME": str(place / "home")}
    directories = {kind: str(checkpoint(place, kind, 0)) for kind in KINDS}
    yield {kind: cluster.start(RoleSpec(kind, EngineRole, of, env=env)) for kind, of in directories.items()}
    cluster.close()


@pytest.fixture
def on(engines):
    """`on(kind, fn, *args)`: fn(engine, *args) in the process of that engine."""

    def on(kind: str, fn: Callable[..., Any], *args: Any) -> Any:
        return engines[kind].call("do", [(fn, args)])[0]

    return on


def reference(directory: Path, kind: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(directory, kind, seed), dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """transformers' log-probs of tokens 1…n-1."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1]
    return (
        torch.log_softmax(logits / temperature, -1)
        .gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        .numpy()
    )


def sent(model: Any, version: int) -> tuple[Buckets, Manifest]:
    """A model's tensors as the trainer sends them: in two buckets, a tied head not twice."""
    tied = model.config.tie_word_embeddings
    pairs = [(k, v.detach().clone()) for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")]
    buckets = [pairs[:5], pairs[5:]]
    return buckets, manifest_of(buckets, version)


def prompts(count: int, seed: int, low: int = 5, high: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, int(rng.integers(low, high))).astype(np.int32) for _ in range(count)]


def requests(count: int, temperature: float, stop: tuple[int, ...] = (), new: int = 12, seed: int = 0) -> list[Request]:
    return [Request(p, Sampling(new, temperature, stop), 100 + i) for i, p in enumerate(prompts(count, seed))]


def generate(engine: VLLMEngine, wanted: list[Request]) -> list[Any]:
    return generate_all(engine, wanted, 60)


def version_of(engine: VLLMEngine) -> int:
    return engine.version


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(on, place, kind, temperature):
    model = reference(place, kind, 0)
    generations = on(kind, generate, requests(32, temperature))
    for generation in generations:
        whole = np.concatenate([generation.context, generation.sampled_ids])
        expected = logprobs(model, whole, temperature or 1.0)[len(generation.context) - 1 :]
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
        if temperature == 0.0:
            with torch.no_grad():
                best = (
                    model(torch.from_numpy(whole.astype(np.int64))[None])
                    .logits[0, len(generation.context) - 1 : -1]
                    .argmax(-1)
                )
            assert generation.sampled_ids.tolist() == best.tolist()
    if temperature == 0.7:  # the control: at another temperature they are not
        assert np.abs(generation.logprobs - logprobs(model, whole)[len(generation.context) - 1 :]).max() > 1e-2


def test_stops_are_ours_alone_and_are_part_of_the_answer(on):
    stop = (40, 41, 42, 43)
    generations = on("tied", generate, requests(64, 1.0, stop))
    for generation in generations:
        assert generation.finished == (generation.sampled_ids[-1] in stop)
        assert not set(generation.sampled_ids[:-1].tolist()) & set(stop)
        assert generation.finished or len(generation.sampled_ids) == 12
        assert generation.versions.tolist() == [0] * len(generation.sampled_ids)
    assert {generation.finished for generation in generations} == {True, False}
    flat = on("tied", generate, requests(256, 2.0))
    ids = np.concatenate([generation.sampled_ids for generation in flat])
    assert all(len(generation.sampled_ids) == 12 for generation in flat), (
        "the model's own end-of-text stopped an answer"
    )
    assert EOS in ids
    assert ids.max() == VOCAB - 1, "either the padding of the vocabulary was sampled, or its last id never is"


def test_an_answer_depends_on_its_seed_and_not_on_the_batch(on):
    wanted = requests(48, 1.0)
    first = on("untied", generate, wanted)
    order = np.random.default_rng(0).permutation(48)
    for i, generation in zip(order, on("untied", generate, [wanted[i] for i in order]), strict=True):
        assert generation.sampled_ids.tolist() == first[i].sampled_ids.tolist()
    mixed = on("untied", generate, [r for pair in zip(wanted, requests(48, 0.0, seed=1), strict=True) for r in pair])
    assert [c.sampled_ids.tolist() for c in mixed[::2]] == [c.sampled_ids.tolist() for c in first], (
        "greedy requests disturbed the seeds"
    )
    alone = on("untied", generate, wanted[:1])
    assert alone[0].sampled_ids.tolist() == first[0].sampled_ids.tolist()
    again = on("untied", generate, [Request(r.context, r.sampling, r.seed + 1) for r in wanted])
    assert sum(a.sampled_ids.tolist() != b.sampled_ids.tolist() for a, b in zip(again, first, strict=True)) > 40


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_sync_it_computes_with_the_new_weights(on, place, kind):
    """Long prompts, so that the prefix cache holds blocks which the old weights made."""
    long = prompts(3, 5, 300, LONGEST)
    wanted = [Request(p[:280], Sampling(8, 1.0, ()), i) for i, p in enumerate(long)]
    held = on(kind, version_of)
    on(kind, generate, wanted)
    before = on(kind, VLLMEngine.prompt_logprobs, long)
    model = reference(place, kind, 1)
    receipt = on(kind, VLLMEngine.load_weights, *sent(model, held + 1))
    assert (receipt.version, receipt.tensors) == (held + 1, len(sent(model, 0)[1].digests))
    after = on(kind, VLLMEngine.prompt_logprobs, long)
    for tokens, old, new in zip(long, before, after, strict=True):
        expected = logprobs(model, tokens)
        np.testing.assert_allclose(new, expected, atol=1e-5)
        assert np.abs(old - expected).max() > 1e-2
    for generation in on(kind, generate, wanted):
        expected = logprobs(model, np.concatenate([generation.context, generation.sampled_ids]))[
            len(generation.context) - 1 :
        ]
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
        assert set(generation.versions.tolist()) == {held + 1}


def test_vllms_own_reload_is_stale_where_ours_is_not(on, place):
    """The control of the test above, and the reason for the extension: should it fail, vLLM was repaired."""
    model, tokens = reference(place, "tied", 2), prompts(1, 9)[0]
    pairs = [pair for bucket in sent(model, 0)[0] for pair in bucket]

    def reload(engine: VLLMEngine) -> np.ndarray:
        engine.engine.collective_rpc(lambda worker: worker.reload_weights(weights_iterator=iter(pairs)))
        return engine.prompt_logprobs([tokens])[0]

    held = on("tied", version_of)
    assert np.abs(on("tied", reload) - logprobs(model, tokens)).max() > 1e-2
    on("tied", VLLMEngine.load_weights, *sent(model, held + 1))
    np.testing.assert_allclose(on("tied", VLLMEngine.prompt_logprobs, [tokens])[0], logprobs(model, tokens), atol=1e-5)


def _dropped(buckets: Buckets) -> None:
    del buckets[1][3]


def _garbled(buckets: Buckets) -> None:
    buckets[1][0][1].view(-1)[17] += 1e-6


def _swapped(buckets: Buckets) -> None:
    (a, x), (b, y) = next((p, q) for p in buckets[1] for q in buckets[1] if p[0] < q[0] and p[1].shape == q[1].shape)
    buckets[1][:] = [(a, y) if name == a else (b, x) if name == b else (name, tensor) for name, tensor in buckets[1]]


def _twice(buckets: Buckets) -> None:
    buckets[0].append(buckets[0][0])


def _unannounced(buckets: Buckets) -> None:
    buckets[0].append(("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2)))


@pytest.mark.parametrize("fault", [_dropped, _garbled, _swapped, _twice, _unannounced, "a lost version", "never sent"])
def test_a_bad_sync_is_refused_and_the_old_weights_stay(on, place, fault):
    tokens, held = prompts(2, 4), on("untied", version_of)
    before = on("untied", VLLMEngine.prompt_logprobs, tokens)
    buckets, manifest = sent(reference(place, "untied", 3), held + 1)
    if fault == "a lost version":
        manifest = Manifest(held + 2, manifest.digests)
    elif fault == "never sent":  # announced and sent agree, but the model has one tensor more
        del buckets[1][3]
        manifest = manifest_of(buckets, held + 1)
    else:
        fault(buckets)
    with pytest.raises(SyncError, match="refused"):
        on("untied", VLLMEngine.load_weights, buckets, manifest)
    assert on("untied", version_of) == held
    for a, b in zip(on("untied", VLLMEngine.prompt_logprobs, tokens), before, strict=True):
        np.testing.assert_array_equal(a, b)
    on("untied", generate, requests(2, 1.0))


def test_giving_up_on_requests_leaves_the_engine_usable(on):
    def give_up(engine: VLLMEngine, wanted: list[Request]) -> tuple[str, int]:
        async def run() -> None:
            await asyncio.wait_for(asyncio.gather(*(engine.generate(r) for r in wanted)), 0.02)

        try:
            asyncio.run(run())
            outcome = "done"
        except TimeoutError:
            outcome = "late"
        with engine.stepper.exclusively("count its requests"):
            return outcome, engine.engine.get_num_unfinished_requests()

    wanted = requests(16, 1.0, new=300)
    assert on("tied", give_up, wanted) == ("late", 0)
    assert len(on("tied", generate, requests(4, 1.0))) == 4


def test_streamed_tokens_add_up_and_a_stream_that_is_closed_is_aborted(on):
    def stream(engine: VLLMEngine, wanted: list[Request]) -> tuple[list[Any], list[Any], int]:
        async def whole(request: Request) -> tuple[list[int], list[float], Any]:
            news = [one async for one in engine.stream(request)]
            tokens = [int(token) for one in news for token in one.sampled_ids]
            return tokens, [float(p) for one in news for p in one.logprobs], news[-1].generation

        async def run() -> list[Any]:
            closed = engine.stream(wanted[0])
            await anext(closed)
            await closed.aclose()
            return await asyncio.gather(*(whole(request) for request in wanted))

        streamed = asyncio.run(run())
        with engine.stepper.exclusively("count its requests"):
            left = engine.engine.get_num_unfinished_requests()
        return streamed, generate(engine, wanted), left

    streamed, at_once, left = on("tied", stream, requests(6, 1.0, new=40))
    for (tokens, logprobs_of, generation), other in zip(streamed, at_once, strict=True):
        assert tokens == generation.sampled_ids.tolist() == other.sampled_ids.tolist()
        assert logprobs_of == generation.logprobs.tolist()
        np.testing.assert_allclose(generation.logprobs, other.logprobs, atol=1e-5)
    assert left == 0


@pytest.mark.parametrize(
    ("context", "why"), [([], "0 tokens"), ([1] * LONGEST, "400 tokens"), ([3, VOCAB], "token ids must be in 0…96")]
)
def test_a_request_that_cannot_be_served_is_refused(on, context, why):
    with pytest.raises(ValueError, match=why):
        on("tied", generate, [Request(np.array(context, np.int32), Sampling(4, 1.0, ()), 0)])
    with pytest.raises(ValueError, match="temperature"):
        on("tied", generate, [Request(np.ones(3, np.int32), Sampling(4, 0.005, ()), 0)])
    longest = Request(np.ones(LONGEST - 3, np.int32), Sampling(8, 1.0, ()), 0)
    assert len(on("tied", generate, [longest])[0].sampled_ids) == 3


def test_nothing_is_written_under_the_home_directory(on, place):
    on("tied", version_of)
    assert [str(path) for path in (place / "home").rglob("*")] == []


def test_a_sync_that_breaks_half_way_ends_the_engine(on, place):
    """A tensor of the wrong shape, truthfully announced. Last: this engine is of no use afterwards."""
    buckets, manifest = sent(reference(place, "untied", 3), on("untied", version_of) + 1)
    buckets[1][4] = (buckets[1][4][0], torch.zeros(3, 5))
    with pytest.raises(SyncError, match="failed half way"):
        on("untied", VLLMEngine.load_weights, buckets, manifest_of(buckets, manifest.version))
    for use in (
        lambda engine: generate_all(engine, requests(1, 1.0), 10),
        lambda engine: engine.prompt_logprobs(prompts(1, 0)),
    ):
        with pytest.raises(SyncError, match="generates nothing"):
            on("untied", use)


def test_it_wants_a_process_of_its_own(place, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        VLLMEngine(str(place), seed=0, dtype="float32", max_model_len=8)
