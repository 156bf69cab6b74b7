"""The mask against an oracle that knows neither template nor prefix: it looks for what was said,
by character offsets, in each sample's text."""

import gzip
import itertools
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.chat import chat_samples
from ptf.data.rendering import Rendering
from ptf.data.sample import Sample
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.templates import ONE_SAMPLE, SPLIT, UNSERVED, templated

WHOLE = (
    "plain",
    "generation_markers",
    "first_system_only",
    "developer",
    "system_folded",
    "next_role_stop",
    "date",
    "end_of_document",
)  # one sample, whatever is said
REWRITTEN = ("drops_thinking", "return_or_end")  # a sample for each turn


# The complexity: one condition for each way in which a mask can be wrong.
def oracle(samples: list[Sample], messages: list[dict[str, Any]], tokenizer: Tokenizer) -> str | None:  # noqa: C901
    """What is wrong with the masks, if anything. The contents of the messages must not occur in one another."""
    trained = dict.fromkeys((i for i, m in enumerate(messages) if m["role"] == "assistant"), 0)
    stops = {tokenizer.decode([i]) for i in tokenizer.stop_ids}
    header = tokenizer.render_text([{"role": "user", "content": "Nr."}], True).split("Nr.")[-1]
    for sample in samples:
        text = tokenizer.decode(sample.tokens)
        spans = offsets(sample, text, header, tokenizer)
        if spans is None:
            return "the sample is not its text"
        on = np.zeros(len(text) + 1, bool)
        for (a, b), weight in zip(spans, sample.loss_weights, strict=True):
            on[a:b] = weight > 0
        for i, message in enumerate(messages):
            said = message["content"].strip()
            at = text.find(said)
            if at < 0:
                continue
            if message["role"] != "assistant":
                if on[at : at + len(said)].any():
                    return f"message {i} ({message['role']}) is trained"
                continue
            if not on[at]:
                if on[at : at + len(said)].any():
                    return f"turn {i} is trained in part"
                continue
            trained[i] += 1
            end = at + len(said)
            stop = next((s for s in stops if text.startswith(s, end)), None)
            if stop is None or not on[at : end + len(stop)].all():
                return f"turn {i} is not trained to the end of the turn"
            if on[end + len(stop)]:
                return f"what follows turn {i} is trained"
        starts = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_weights])) > 0)
        for start in starts:  # what is trained before the content, if anything, is what the model itself must write
            before = tokenizer.decode(sample.tokens[:start])
            if not before.endswith(header[-6:]):
                return "a span does not start where the generation prompt ends"
    if any(n != 1 for n in trained.values()):
        return f"turns are trained {trained} times"
    return None


def offsets(sample: Sample, text: str, header: str, tokenizer: Tokenizer) -> list[tuple[int, int]] | None:
    """The characters of each token: of the text as a whole or, where a token would span the end of a generation prompt
    (Qwen3.5), of its pieces."""
    for pieces in ([text], re.split(f"(?<={re.escape(header)})", text)):
        encoded = [tokenizer.hf(piece, add_special_tokens=False, return_offsets_mapping=True) for piece in pieces]
        if [i for piece in encoded for i in piece["input_ids"]] == sample.tokens.tolist():
            starts = itertools.accumulate(map(len, pieces), initial=0)
            return [
                (a + at, b + at) for at, piece in zip(starts, encoded, strict=False) for a, b in piece["offset_mapping"]
            ]
    return None


def numbered(texts: list[str], roles: list[str]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": f"Nr{i}. {text} Rn{i}."}
        for i, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def alternating(n: int, system: bool) -> list[str]:
    return ["system"] * system + ["user", "assistant"] * n


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t  <>|/"), max_size=40).map(
    # Qwen's tokenizer normalizes; the oracle compares characters
    lambda text: unicodedata.normalize("NFC", text).replace("<|", "|")
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    roles = alternating(draw(st.integers(1, 4)), draw(st.booleans()))
    return numbered([draw(TEXTS) for _ in roles], roles)


def masks_agree(tokenizer: Tokenizer, one: bool, examples: int, system: bool = True) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(conversations())
    def check(messages: list[dict[str, Any]]) -> None:
        messages = [m for m in messages if system or m["role"] != "system"]
        samples = chat_samples(messages, tokenizer)
        assert oracle(samples, messages, tokenizer) is None
        turns = sum(m["role"] == "assistant" for m in messages)
        assert len(samples) == (1 if one else turns)
        last = chat_samples(messages, tokenizer, train_on="last")
        assert len(last) == 1
        assert (
            oracle(
                last,
                [m | {"role": "user"} if m["role"] == "assistant" and m is not messages[-1] else m for m in messages],
                tokenizer,
            )
            is None
        )

    check()


@pytest.mark.hypothesis  # the property is inside
@pytest.mark.parametrize("template", [*WHOLE, *REWRITTEN])
def test_masks_agree_with_the_oracle(template: str) -> None:
    masks_agree(templated(template), template in WHOLE, 20)


@pytest.mark.long
@pytest.mark.hypothesis
def test_masks_of_real_templates_agree_with_the_oracle(shared: Path) -> None:
    # Mistral-Nemo shows the system message only before the first answer: see below
    for template in (*ONE_SAMPLE, *SPLIT):
        masks_agree(templated(template, shared), template in ONE_SAMPLE, 10, template != "mistral-nemo")


@pytest.mark.parametrize("template", ["drops_thinking", "end_of_document"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_the_oracle_catches_a_mask_that_is_off_by_one(template: str, shift: int) -> None:
    tokenizer = templated(template)
    messages = numbered(["a", "b", "c", "d"], alternating(2, False))
    wrong = [Sample(s.tokens, np.roll(s.loss_weights, shift)) for s in chat_samples(messages, tokenizer)]
    assert oracle(wrong, messages, tokenizer) is not None


def refused_as_never_served(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        UserError,
        match=rf"chat template {re.escape(tokenizer.template_name)}, turn 1: the generation prompt ends in '<think>",
    ):
        chat_samples(numbered(["a", "b"], ["user", "assistant"]), tokenizer)


def test_a_turn_that_is_never_served_is_refused() -> None:
    refused_as_never_served(templated("thinking_opened"))


def test_a_turn_that_is_never_served_by_a_real_template_is_refused(shared: Path) -> None:
    for template in UNSERVED:
        refused_as_never_served(templated(template, shared))


def test_a_moving_system_message_is_refused() -> None:
    """As Mistral-Nemo, it shows the system message with the last user message only while that is the last message."""
    with pytest.raises(UserError, match="turn 2: the generation prompt"):
        chat_samples(numbered(["a", "b", "c"], ["system", "user", "assistant"]), templated("moving_tools"))


@pytest.mark.parametrize("template", ["drops_tools", "system_folded", "end_of_document"])
def test_a_template_that_drops_tool_calls_is_refused(template: str) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"x": 1}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(UserError, match="turn 1: the template leaves out 'lookup'"):
        chat_samples(messages, templated(template))


def calling(content: str, *names: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"call0000{k}", "type": "function", "function": {"name": name, "arguments": {"x": k}}}
        for k, name in enumerate(names)
    ]
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": calls}]


@pytest.mark.parametrize(
    ("template", "messages", "part"),
    [
        ("drops_tools", calling("I lookup that.", "lookup"), "lookup"),
        ("end_of_document", calling("", "end"), "end"),  # as in <|end|>
        ("return_or_end", calling("", "lookup", "lookup"), "lookup"),  # shows one call a turn
        ("moving_tools", calling("look", "lookup"), "look"),  # shows a call or what was said, not both
        (
            "plain",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b, so c", "reasoning_content": "b"}],
            "b",
        ),
        (
            "plain",
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>", "reasoning_content": "<think>"},
            ],
            "<think>",
        ),
        (
            "drops_thinking",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<think>c</think>d"}],
            "b",
        ),
        (
            "drops_thinking",
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c</think>d"}],
            "c",
        ),
    ],
)
def test_a_part_that_only_seems_to_be_there_is_refused(
    template: str, messages: list[dict[str, Any]], part: str
) -> None:
    """What a template drops may stand in something else that it shows, or in its own markers."""
    with pytest.raises(UserError, match=f"turn 1: the template leaves out '{part}'"):
        chat_samples(messages, templated(template))


def test_thinking_inside_the_content_may_be_laid_out_anew() -> None:
    tokenizer = templated("drops_thinking")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    (sample,) = chat_samples(messages, tokenizer)
    assert tokenizer.decode(sample.tokens[sample.loss_weights > 0]) == "<think>\nb\n</think>\n\nc<|im_end|>"


def test_a_refusing_template_names_the_turn() -> None:
    tokenizer = templated("no_system")
    tokenizer.rendering = Rendering(consecutive="keep")
    messages = numbered(["a", "b", "c", "d"], ["user", "assistant", "assistant", "user"])
    with pytest.raises(
        UserError, match=f"turn 2: chat template {tokenizer.template_name} refuses the messages: roles must alternate"
    ):
        chat_samples(messages, tokenizer)


@pytest.mark.parametrize(
    "template", ["return_or_end", "plain", "drops_thinking", "next_role_stop", "moving_tools", "two_stops"]
)
def test_tool_calls_are_trained_and_their_results_are_not(template: str) -> None:
    tokenizer = templated(template)
    call = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"x": "Denver"}'}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '"sunny"', "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It shines."},
    ]
    samples = chat_samples(messages, tokenizer)
    said = "".join(tokenizer.decode(s.tokens[s.loss_weights > 0]) for s in samples)
    assert said.count("lookup") == said.count("Denver") == said.count("It shines.") == 1
    assert "sunny" not in said
    stops = [
        s.tokens[i]
        for s in samples
        for i in np.flatnonzero((s.loss_weights > 0) & ~(np.append(s.loss_weights[1:], 0) > 0))
    ]
    assert len(stops) == 2
    assert set(stops) <= set(tokenizer.stop_ids)


def test_thinking_is_trained_where_the_template_shows_it() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "ponder"}]
    (sample,) = chat_samples(messages, templated("drops_thinking"))
    assert (
        templated("drops_thinking").decode(sample.tokens[sample.loss_weights > 0])
        == "<think>\nponder\n</think>\n\nb<|im_end|>"
    )
    with pytest.raises(UserError, match="leaves out 'ponder'"):
        chat_samples(messages, templated("plain"))


def test_a_token_over_the_end_of_the_prompt_is_cut_as_a_server_cuts_it() -> None:
    """The prompt ends in "\\n\\n", which is one token where nothing follows: rendered as one text,
    its end would be other ids than are served."""
    tokenizer = templated("drops_thinking, enable_thinking: false")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    (sample,) = chat_samples(messages, tokenizer)
    prompt = tokenizer.render(messages[:1], True)
    assert sample.tokens[: len(prompt)].tolist() == prompt != tokenizer.render(messages, False)[: len(prompt)]
    assert sample.loss_weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(sample) - len(prompt))
    assert tokenizer.decode(sample.tokens[len(prompt) :]) == "yes<|im_end|>"


def test_real_conversations(shared: Path) -> None:
    with gzip.open(shared / "chat/oasst_en100_paths.jsonl.gz") as lines:
        conversations = [json.loads(line)["messages"] for line in itertools.islice(lines, 60)]
    for template in ("qwen2.5", "qwen3", "gpt-oss", "minimind", "phi-3.5"):
        tokenizer = templated(template, shared)
        for messages in conversations:
            contents = [m["content"].strip() for m in messages]
            if not any(a in b for a, b in itertools.permutations(contents, 2)):
                assert oracle(chat_samples(messages, tokenizer), messages, tokenizer) is None


USER, CALL = {"role": "user", "content": "a"}, {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be a list of messages, and not empty"),
        ("hello", "must be a list of messages"),
        ([{"content": "a"}], "message 0 must be an object with a `role`"),
        ([USER], "no assistant turn"),
        ([{"role": "user", "content": None}], "message 0 .user.: `content` must be a string"),
        ([USER, {"role": "assistant", "content": ["b"]}], "message 1 .assistant.: `content` must be a string"),
        ([{"role": "assistant", "content": "a"}], "turn 0: the assistant speaks first"),
        (
            [USER, {"role": "assistant", "content": "b<|im_end|>c"}],
            "turn 1: the end-of-turn token '<|im_end|>' stands inside",
        ),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "arguments of f are not JSON"),
    ],
)
def test_bad_conversations_are_refused(characters: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        chat_samples(messages, characters)


def test_a_template_without_an_end_of_turn_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    endless = Tokenizer.load(str(tmp_path))
    endless.hf.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}{{ 'assistant ' if "
        "add_generation_prompt }}"
    )
    with pytest.raises(UserError, match=r"turn 1: no end-of-turn token; known ones are \['<\|im_end\|>'\]"):
        chat_samples([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], endless)


def test_a_full_mask_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    bare = Tokenizer.load(str(tmp_path))
    bare.hf.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    bare.rendering = Rendering(allow_unseen=True)
    with pytest.raises(UserError, match="turn 1: nothing comes before the response"):
        chat_samples([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], bare)
