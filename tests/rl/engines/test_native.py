"""Generation with our own decoder against transformers, and the properties that the RL loop relies on."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import Request, Sampling, generate_all
from tests.tiny import checkpoint

STOP = 5


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("engine") / "m")


@pytest.fixture(params=[False, True], ids=["batches", "continuous"])
def engine(directory, request):
    return NativeEngine(
        str(directory), device=torch.device("cpu"), dtype=torch.float32, version=3, continuous=request.param
    )


def contexts(n: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 97, int(rng.integers(2, 30))).astype(np.int32) for _ in range(n)]


def ask(contexts, temperature: float = 1.0, limit: int = 12) -> list[Request]:
    return [Request(c, Sampling(limit, temperature, (STOP,)), seed=100 + i) for i, c in enumerate(contexts)]


def test_greedy_answers_equal_transformers(directory, engine):
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for generation in generate_all(engine, ask(contexts(8), temperature=0.0), 60):
        ids = torch.tensor(generation.context[None].astype(np.int64))
        out = reference.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=STOP, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        assert generation.sampled_ids.tolist() == out


def test_logprobs_are_those_of_the_distribution_sampled_from(directory, engine):
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for temperature in (1.0, 0.7):
        for generation in generate_all(engine, ask(contexts(8), temperature), 60):
            ids = torch.tensor(np.concatenate([generation.context, generation.sampled_ids])[None].astype(np.int64))
            logprobs = (reference(ids).logits[0, :-1] / temperature).log_softmax(-1)
            expected = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)[len(generation.context) - 1 :]
            assert np.abs(expected.detach().numpy() - generation.logprobs).max() <= 1e-5
            assert set(generation.versions.tolist()) == {3}
            assert generation.finished == (generation.sampled_ids[-1] == STOP)
            assert STOP not in generation.sampled_ids[:-1]


def test_an_answer_does_not_depend_on_its_batch(engine):
    requests = ask(contexts(12) + contexts(2))  # the last two contexts stand twice
    requests[3] = replace(requests[3], sampling=replace(requests[3].sampling, temperature=0.0))
    requests[5] = replace(requests[5], sampling=replace(requests[5].sampling, top_p=0.8))
    together = generate_all(engine, requests, 60)
    backwards = generate_all(engine, requests[::-1], 60)[::-1]
    alone = [generate_all(engine, [r], 60)[0] for r in requests]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.sampled_ids.tolist() == b.sampled_ids.tolist() == c.sampled_ids.tolist()


def test_samples_follow_the_distribution(engine):
    """4,000 draws of one token: the frequency of each token stays within 5 standard errors of its probability."""
    context = contexts(1)[0]
    generations = generate_all(engine, [Request(context, Sampling(1, 1.0, ()), seed=i) for i in range(4000)], 60)
    first = np.array([c.sampled_ids[0] for c in generations])
    frequency = np.bincount(first, minlength=97) / 4000
    p = np.zeros(97)
    p[first] = np.exp([c.logprobs[0] for c in generations])
    unseen = p == 0
    assert (np.abs(frequency - p)[~unseen] <= 5 * np.sqrt(p * (1 - p) / 4000)[~unseen] + 1e-9).all()
    assert 1 - p.sum() < 0.05


def test_scores_equal_transformers(directory, engine):
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    several = contexts(5)
    for tokens, got in zip(several, engine.prompt_logprobs(several), strict=True):
        ids = torch.tensor(tokens[None].astype(np.int64))
        expected = reference(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        assert np.abs(expected.detach().numpy() - got).max() <= 1e-5


def test_an_error_reaches_everyone_who_waits_and_a_deadline_holds(engine, monkeypatch):
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_all(engine, ask(contexts(3)), 60)

    class Slow:
        async def generate(self, request):
            await asyncio.sleep(30)

    with pytest.raises(TimeoutError):
        generate_all(Slow(), ask(contexts(2)), 0.1)


@pytest.mark.parametrize("continuous", [False, True])
def test_with_passes_of_one_shape_responses_are_the_same_and_the_warm_up_has_that_shape(directory, continuous):
    """As on a GPU, where attention is compiled for each shape in which contexts are computed."""
    kwargs = {"device": torch.device("cpu"), "dtype": torch.float32, "version": 3, "continuous": continuous}
    usual = NativeEngine(str(directory), **kwargs)
    engine = NativeEngine(str(directory), prefill_tokens=64, **kwargs)
    shapes: list[tuple[int, ...]] = []
    engine.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    engine.prompt_logprobs([np.zeros(2, np.int32)])
    (warmed,) = set(shapes)
    assert warmed == (1, 64)
    several = [*contexts(12), *contexts(3, seed=1)]  # some 240 tokens
    for ours, theirs in zip(generate_all(engine, ask(several), 60), generate_all(usual, ask(several), 60), strict=True):
        assert ours.sampled_ids.tolist() == theirs.sampled_ids.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() <= 1e-5
    for ours, theirs in zip(engine.prompt_logprobs(several), usual.prompt_logprobs(several), strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5
    assert (
        sum(shape == warmed for shape in shapes) >= 9
    )  # of the contexts, and of the log-probs: four passes or more each
    assert {shape for shape in shapes if shape[1] > 1} == {warmed}  # the others are steps of one token
    long = np.arange(6, 86, dtype=np.int32)  # longer than a pass: one of its own
    (one,), (other,) = generate_all(engine, ask([long]), 60), generate_all(usual, ask([long]), 60)
    assert one.sampled_ids.tolist() == other.sampled_ids.tolist()
