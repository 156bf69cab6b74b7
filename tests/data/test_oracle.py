"""The mask against a second way to find it, on real and on made-up conversations; `make bench-masks` does the same on all of them."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ptf.data.chat
from ptf.data.sample import Sample
from ptf.data.tokenizer import Tokenizer
from tests.data.agreement import difference, judge, outcome
from tests.data.conversations import Conversation, fuzzed, real, said
from tests.data.oracle import Masked, Oracle, Refusal
from tests.data.templates import ONE_SAMPLE, OWN, SPLIT, UNSERVED, markers, templated

SERVED = [*ONE_SAMPLE, *SPLIT, *OWN]
SOME = {"gsm8k": 6, "oasst": 4, "sgd": 3, "tau": 1, "pairs": 2, "taskmaster": 2}  # conversations of each for each template
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"x": "1"}'}}]
CALL = {"role": "assistant", "content": None, "tool_calls": CALLS}
TWO_TURNS = [said("user", "a"), said("assistant", "Yes, b."), said("user", "c"), said("assistant", "d")]


@functools.cache
def oracle_of(shared: Path, name: str) -> Oracle:
    return Oracle(templated(shared, name).hf)


@functools.cache
def grouped(shared: Path) -> dict[str, list[Conversation]]:
    return {source: list(group) for source, group in itertools.groupby(real(shared), lambda c: c.source)}


@pytest.mark.parametrize("name", [*SERVED, *UNSERVED])
def test_real_conversations(shared: Path, name: str) -> None:
    spans = 0
    for source, count in SOME.items():
        for conversation in Random(f"{name}/{source}").sample(grouped(shared)[source], count):
            verdict = judge(templated(shared, name), oracle_of(shared, name), conversation)
            assert verdict.problem is None, conversation
            spans += verdict.spans
    assert spans or name in UNSERVED


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize("name", [*SERVED, *UNSERVED])
def test_fuzzed_conversations(shared: Path, name: str) -> None:
    tokenizer = templated(shared, name)
    spans = 0

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        nonlocal spans
        conversation = fuzzed(random, markers(tokenizer.hf.chat_template))
        verdict = judge(tokenizer, oracle_of(shared, name), conversation)
        assert verdict.problem is None, conversation
        spans += verdict.spans

    check()
    assert spans > 10 or name in UNSERVED


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2.5", ["Yes, b.<|im_end|>", '<tool_call>\n{"name": "lookup", "arguments": {"x": "1"}}\n</tool_call><|im_end|>']),
        ("qwen3", ["<think>\n\n</think>\n\nYes, b.<|im_end|>",
                   '<think>\n\n</think>\n\n<tool_call>\n{"name": "lookup", "arguments": {"x": "1"}}\n</tool_call><|im_end|>']),
        ("gpt-oss", ["<|channel|>final<|message|>Yes, b.<|return|>", ' to=functions.lookup<|channel|>commentary json<|message|>{"x": "1"}<|call|>']),
        ("mistral-nemo", ["Yes, b.</s>", '[TOOL_CALLS][{"name": "lookup", "arguments": {"x": "1"}, "id": "call00001"}]</s>']),
    ],
)  # fmt: skip
def test_the_oracle_finds_what_a_person_would(shared: Path, name: str, expected: list[str]) -> None:
    hf = templated(shared, name).hf
    found = [
        hf.decode([i for i, _ in run])
        for ids, mask in oracle_of(shared, name)([*TWO_TURNS[:3], CALL])
        for trained, run in itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
        if trained
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "messages", "turn", "reason"),
    [
        ("granite-3.3", [said("user", "a"), CALL], 1, "left out"),
        ("mistral-nemo", [said("user", "a"), {**CALL, "content": "loo"}], 1, "left out"),  # not shown beside a call, if some of it is found in the name
        ("qwen3", [said("user", "a"), said("assistant", "thi<think>b</think>c")], 1, "left out"),
        ("deepseek-r1-distill-qwen", TWO_TURNS, 1, "never served"),
        ("qwen3.5-think", [said("user", "a"), said("system", "b"), said("assistant", "c")], 2, "template refuses"),
        ("phi-3.5", [said("user", "a"), said("assistant", "b<|end|>c")], 1, "stop inside"),
        ("phi-3.5", [said("assistant", "b")], 0, "speaks first"),
        ("phi-3.5", [said("user", "b")], None, "no assistant turn"),
    ],
)
def test_the_oracle_says_why_not(shared: Path, name: str, messages: list[dict[str, Any]], turn: int | None, reason: str) -> None:
    with pytest.raises(Refusal) as refusal:
        oracle_of(shared, name)(messages)
    assert (refusal.value.turn, refusal.value.reason) == (turn, reason)
    assert judge(templated(shared, name), oracle_of(shared, name), Conversation("test", messages)).problem is None


def shift_start(by: int) -> Callable[[np.ndarray], None]:
    def change(weights: np.ndarray) -> None:
        start = weights.argmax()
        weights[min(start, start + by) : max(start, start + by)] = by < 0

    return change


def shift_end(by: int) -> Callable[[np.ndarray], None]:
    def change(weights: np.ndarray) -> None:
        end = weights.argmax() + weights[weights.argmax() :].argmin()  # of the first turn
        weights[min(end, end + by) : max(end, end + by)] = by > 0

    return change


def miss_last(weights: np.ndarray) -> None:
    weights[len(weights) - weights[::-1].argmin() :] = 0


MISTAKES: dict[str, Callable[[np.ndarray], Any]] = {
    "starts one early": shift_start(-1),
    "starts one late": shift_start(1),
    "the header is trained": shift_start(-3),
    "the end of turn is not trained": shift_end(-1),
    "what follows the end of turn is trained": shift_end(1),
    "a turn is missed": miss_last,
    "all is trained": lambda weights: weights.fill(1),
    "nothing is trained": lambda weights: weights.fill(0),
    "the rest is trained": lambda weights: np.logical_not(weights, out=weights),
}


def changed(samples: list[Sample], mistake: Callable[[np.ndarray], Any]) -> list[Sample]:
    weights = samples[0].weights.copy()
    mistake(weights)
    assert not np.array_equal(weights, samples[0].weights)
    return [Sample(samples[0].tokens, weights), *samples[1:]]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["qwen2.5", "mistral-nemo", "phi-3.5"])
def test_a_wrong_mask_is_seen(shared: Path, name: str, mistake: str) -> None:
    samples, expected = both(shared, name)
    assert difference(samples, expected) is None
    assert difference(changed(samples, MISTAKES[mistake]), expected) is not None


def test_wrong_samples_are_seen(shared: Path) -> None:
    samples, expected = both(shared, "qwen3")
    first, second = samples
    assert difference([first], expected) == "1 samples, not 2"
    assert difference([second, first], expected) == "other ids in sample 0"
    assert difference([first, Sample(second.tokens[:-1], second.weights[:-1])], expected) == "other ids in sample 1"


def both(shared: Path, name: str) -> tuple[list[Sample], list[Masked]]:
    samples = outcome(templated(shared, name), Conversation("test", TWO_TURNS))
    assert isinstance(samples, list)
    return samples, oracle_of(shared, name)(TWO_TURNS)


def test_mistakes_in_the_code_are_seen(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them in some of 60 conversations at most."""

    def problems(name: str) -> int:
        tokenizer = templated(shared, name)
        some = [fuzzed(Random(seed), markers(tokenizer.hf.chat_template)) for seed in range(60)]
        return sum(judge(tokenizer, oracle_of(shared, name), c).problem is not None for c in some)

    def without_tools(self: Tokenizer, messages: Any, prompt: bool, tools: Any = None) -> str:
        return self.hf.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)

    mistakes: list[tuple[str, Any, str, Any]] = [
        ("granite-3.3", ptf.data.chat, "_parts", lambda message: []),  # dropped calls pass
        (
            "qwen3.5-think",
            ptf.data.chat,
            "encode_growing",
            lambda texts, tokenizer: tokenizer.encode_all([t.rstrip() for t in texts]),
        ),  # prompts lose their last line break
        ("gpt-oss", templated(shared, "gpt-oss"), "stop_ids", (151643,)),  # the directory's eos, which ends no turn of a chat
        ("qwen2.5", Tokenizer, "render_text", without_tools),
    ]
    for name, owner, attribute, wrong in mistakes:
        assert problems(name) == 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, wrong)
            assert problems(name) > 0, attribute
