"""The mask against a second way to find it, on made-up conversations under templates of our own, and on real ones where
PTF_DATA has them; `make bench-masks` does the same on many more."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import ptf.data.chat
from ptf.data.document import Document
from ptf.data.tokenizer import Tokenizer
from tests.data.agreement import difference, judge, outcome
from tests.data.conversations import Conversation, fuzzed, real, said
from tests.data.oracle import Masked, Oracle, Refusal
from tests.data.templates import CASES, OURS, REAL, REFUSED, markers, templated

NEVER = ("thinking_opened",)  # none of its turns is served as it is rendered
# conversations of each for each template
SOME = {"gsm8k": 6, "oasst": 4, "sgd": 3, "tau": 1, "pairs": 2, "taskmaster": 2}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"x": "1"}'}}]
CALL = {"role": "assistant", "content": None, "tool_calls": CALLS}
TWO_TURNS = [said("user", "a"), said("assistant", "Yes, b."), said("user", "c"), said("assistant", "d")]
LOOKED = [*TWO_TURNS[:3], CALL]


@functools.cache
def oracle_of(name: str, shared: Path | None = None) -> Oracle:
    tokenizer = templated(name, shared)
    return Oracle(tokenizer.hf, CASES[name], **tokenizer.rendering.arguments)


def spans_of(name: str, conversations: list[Conversation], shared: Path | None = None) -> int:
    """How many turns were trained; all alike."""
    spans = 0
    for conversation in conversations:
        verdict = judge(templated(name, shared), oracle_of(name, shared), conversation)
        assert verdict.problem is None, (name, conversation)
        spans += verdict.spans
    return spans


def made_up(name: str, count: int, shared: Path | None = None) -> list[Conversation]:
    marks = markers(templated(name, shared).hf.chat_template)
    return [fuzzed(Random(f"{name}/{n}"), marks) for n in range(count)]


@pytest.mark.parametrize("name", OURS)
def test_fuzzed_conversations(name: str) -> None:
    spans = spans_of(name, made_up(name, 25))
    assert (spans > 4) == (name not in (*NEVER, "empty_thought_prompt"))


def test_each_refused_model_trains_by_default_or_by_a_key() -> None:
    for model, names in REFUSED.items():
        plain = Conversation("test", TWO_TURNS)
        thinking = Conversation("test", [said("user", "a"), said("assistant", "<think>\nb\n</think>\n\nc")])
        assert any(spans_of(name, [plain]) == 2 for name in names), model
        # whose thinking has other tags
        assert any(spans_of(name, [thinking]) == 1 for name in names) or model == "Gemma 4", model


@pytest.mark.long
def test_real_templates(shared: Path) -> None:
    grouped = {source: list(group) for source, group in itertools.groupby(real(shared), lambda c: c.source)}
    for name in REAL:
        some = [c for source, count in SOME.items() for c in Random(f"{name}/{source}").sample(grouped[source], count)]
        spans = spans_of(name, [*some, *made_up(name, 20, shared)], shared)
        assert spans > 4 or name in ("deepseek-r1-distill-qwen", "qwq-32b")


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("plain", LOOKED, ["Yes, b.<|im_end|>", '\n<call>lookup {"x": "1"}</call><|im_end|>']),
        (
            "drops_thinking",
            TWO_TURNS,
            ["<think>\n\n</think>\n\nYes, b.<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"],
        ),
        (
            "return_or_end",
            LOOKED,
            [
                "<|channel|>final<|message|>Yes, b.<|return|>",
                ' to=lookup<|channel|>commentary<|message|>{"x": "1"}<|call|>',
            ],
        ),
        (
            "next_role_stop",
            LOOKED,
            [
                "\n<think></think>\nYes, b.<|user|>",
                "\n<think></think>\n<tool_call>lookup\n<key>x</key>\n<value>1</value>\n</tool_call><|observation|>",
            ],
        ),
        (
            "closed_by_next",
            LOOKED,
            ["Yes, b.<|assistant_end|>", '<|tools_prefix|>[{"lookup": {"x": "1"}}]<|tools_suffix|>'],
        ),
        (
            "two_stops",
            LOOKED,
            [
                "<|response_start|>Yes, b.<|response_end|><|turn_end|>",
                (
                    '<|thinking_start|><|thinking_end|><|action_start|>[{"name": "lookup", "arguments": {"x": '
                    '"1"}}]<|action_end|><|turn_end|>'
                ),
            ],
        ),
        (
            "thinking_opened, render: served",
            [said("user", "a"), said("assistant", "<think>b</think>c")],
            ["b\n</think>\n\nc</s>"],
        ),
        ("thinking_switch, render: served", TWO_TURNS[:2], ["\n</think>\n\nYes, b.<|im_end|>"]),
        ("empty_thought_prompt, render: served", TWO_TURNS[:2], ["Yes, b.<|end|>"]),
        ("moving_tools, render: served", [said("system", "s"), *TWO_TURNS[:2]], [" Yes, b.</s>"]),
        ("text_arguments", [said("user", "a"), CALL], ['<|call_begin|>lookup<|sep|>{"x": "1"}<|call_end|></s>']),
        ("only_end_of_document", TWO_TURNS[:2], [" Yes, b.</s>"]),
    ],
)
def test_what_a_person_would_train(name: str, messages: list[dict[str, Any]], expected: list[str]) -> None:
    """By the oracle, and by ptf."""
    hf = templated(name).hf
    found = [
        hf.decode([i for i, _ in run])
        for ids, mask in oracle_of(name)(messages)
        for trained, run in itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
        if trained
    ]
    assert found == expected
    assert spans_of(name, [Conversation("test", messages)]) == len(expected)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "lookup", "description": "Looks", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize(
    ("name", "messages", "turn", "reason"),
    [
        ("drops_tools", [said("user", "a"), CALL], 1, "left out"),
        ("system_folded", [said("user", "a"), CALL], 1, "left out"),
        ("end_of_document", [said("user", "a"), CALL], 1, "left out"),
        # not shown beside a call, if some of it is found in the name
        ("moving_tools", [said("user", "a"), {**CALL, "content": "loo"}], 1, "left out"),
        ("drops_thinking", [said("user", "a"), said("assistant", "thi<think>b</think>c")], 1, "left out"),
        ("thinking_opened", TWO_TURNS, 1, "never served"),
        ("moving_tools", [said("system", "a"), said("user", "b"), said("assistant", "c")], 2, "never served"),
        ("moving_tools", [said("user", "a"), said("system", "b"), said("assistant", "c")], 2, "template refuses"),
        ("no_system", [said("user", "a"), said("assistant", "b<|end|>c")], 1, "stop inside"),
        ("plain", [said("assistant", "b")], 0, "speaks first"),
        ("plain", [said("user", "b")], None, "no assistant turn"),
        ("first_system_only", [said("user", "a"), said("developer", "b"), said("assistant", "c")], 2, "unseen context"),
        ("first_system_only", [said("user", "a"), said("system", "b"), said("assistant", "c")], 2, "unseen context"),
        ("drops_results", [said("user", "a"), CALL, said("tool", "b"), said("assistant", "c")], 3, "unseen context"),
        (
            "empty_thought_prompt, render: served",
            [said("user", "a"), said("assistant", "<think>b</think>c")],
            1,
            "no tags",
        ),
        (
            "thinking_switch, enable_thinking: false",
            [said("user", "a"), said("assistant", "b") | {"reasoning_content": "c"}],
            1,
            "never served",
        ),
    ],
)
def test_the_oracle_says_why_not(name: str, messages: list[dict[str, Any]], turn: int | None, reason: str) -> None:
    with pytest.raises(Refusal) as refusal:
        oracle_of(name)(messages)
    assert (refusal.value.turn, refusal.value.reason) == (turn, reason)
    spans_of(name, [Conversation("test", messages)])


def test_dropped_tools_are_unseen_context_and_empty_ones_are_none() -> None:
    with pytest.raises(Refusal, match="unseen context"):
        oracle_of("drops_tools")(TWO_TURNS, TOOLS)
    assert spans_of("drops_tools", [Conversation("test", TWO_TURNS, tools) for tools in (TOOLS, [], None)]) == 4
    assert spans_of("drops_tools, omitted_context: allow", [Conversation("test", TWO_TURNS, TOOLS)]) == 2


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


def changed(samples: list[Document], mistake: Callable[[np.ndarray], Any]) -> list[Document]:
    weights = samples[0].loss_weights.copy()
    mistake(weights)
    assert not np.array_equal(weights, samples[0].loss_weights)
    return [Document(samples[0].tokens, weights), *samples[1:]]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["plain", "moving_tools", "next_role_stop"])
def test_a_wrong_mask_is_seen(name: str, mistake: str) -> None:
    samples, expected = both(name)
    assert difference(samples, expected) is None
    assert difference(changed(samples, MISTAKES[mistake]), expected) is not None


def test_wrong_samples_are_seen() -> None:
    samples, expected = both("drops_thinking")
    first, second = samples
    assert difference([first], expected) == "1 samples, not 2"
    assert difference([second, first], expected) == "other ids in sample 0"
    assert (
        difference([first, Document(second.tokens[:-1], second.loss_weights[:-1])], expected) == "other ids in sample 1"
    )


def both(name: str) -> tuple[list[Document], list[Masked]]:
    samples = outcome(templated(name), Conversation("test", TWO_TURNS))
    assert isinstance(samples, list)
    return samples, oracle_of(name)(TWO_TURNS)


def test_mistakes_in_the_code_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them in some of 25 conversations at most."""

    def problems(name: str) -> int:
        return sum(judge(templated(name), oracle_of(name), c).problem is not None for c in made_up(name, 25))

    def without_tools(self: Tokenizer, messages: Any, prompt: bool, tools: Any = None, arguments: Any = None) -> str:
        return self.hf.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)

    closings = templated("next_role_stop").closings
    unclosed = {calls: closing._replace(borrowed="") for calls, closing in closings.items()}
    mistakes: list[tuple[str, Any, str, Any]] = [
        ("drops_tools, omitted_context: allow", ptf.data.chat, "_parts", lambda message: []),  # dropped calls pass
        ("drops_results", ptf.data.chat, "raise_if_unseen", lambda *_, **__: None),  # dropped context passes
        (
            "drops_thinking, enable_thinking: false",
            ptf.data.chat,
            "encode_incrementally",
            # prompts lose their last line break
            lambda texts, tokenizer: tokenizer.encode_all([t.rstrip() for t in texts]),
        ),
        # the directory's eos, which ends no turn of a chat
        ("return_or_end", templated("return_or_end"), "stop_ids", (0,)),
        ("next_role_stop", templated("next_role_stop"), "closings", unclosed),
        ("plain", Tokenizer, "render_text", without_tools),
    ]
    for name, owner, attribute, wrong in mistakes:
        assert problems(name) == 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, wrong)
            assert problems(name) > 0, (name, attribute)
