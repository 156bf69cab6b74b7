"""Which turns of a chat are trained, and how much each counts."""

from typing import Any

import pytest

from ptf.data.chat import AMBIGUOUS, SWITCHES, WEIGHT, chat_samples
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

HEAD = "<|im_start|><|assistant|>"


def chat(*marks: Any) -> list[dict[str, Any]]:
    """A question and an answer for each mark."""
    return [
        m
        for i, mark in enumerate(marks)
        for m in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}", "w": mark})
    ]


def trained(tokenizer: Tokenizer, messages: list[dict[str, Any]], train_on: str) -> dict[str, float]:
    """Text of each trained token, joined where the weight stays the same, with that weight."""
    (sample,) = chat_samples(messages, tokenizer, train_on=train_on)
    found: dict[str, float] = {}
    text, last = "", 0.0
    for token, weight in [*zip(sample.tokens, sample.loss_weights.tolist(), strict=True), (None, 0.0)]:
        if weight != last and text:
            found[text] = last
            text = ""
        last = weight
        text += tokenizer.decode([token]) if weight else ""
    return found


def test_all_turns_the_last_or_every_token(characters: Tokenizer) -> None:
    messages = chat(1, 1)
    assert trained(characters, messages, "assistant") == {"a0<|im_end|>": 1.0, "a1<|im_end|>": 1.0}
    assert trained(characters, messages, "last") == {"a1<|im_end|>": 1.0}
    whole = characters.decode(characters.render(messages, False))
    assert trained(characters, messages, "all") == {whole.removeprefix("<|im_start|>"): 1.0}


def test_a_field_says_how_much_a_turn_counts(characters: Tokenizer) -> None:
    assert trained(characters, chat(True, 0, 0.5), "field:w") == {"a0<|im_end|>": 1.0, "a2<|im_end|>": 0.5}
    assert trained(characters, chat(False, 2), "field:w") == {"a1<|im_end|>": 2.0}


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        (chat(0, False), "no turn of the conversation counts: `w` is 0 or false on every one"),
        (
            chat(1, None),
            (
                r"message 3 \(assistant\): `w`, which says how much it counts, must be true, "
                r"false or a number from 0, not None"
            ),
        ),
        (chat(1, -1), "not -1"),
        (chat(1, "yes"), "not 'yes'"),
        (
            [{"role": "user", "content": "q", "w": 1}, {"role": "assistant", "content": "a", "w": 1}],
            r"message 0 \(user\): only what the assistant says",
        ),
    ],
)
def test_marks_that_do_not_say_it_are_refused(characters: Tokenizer, messages: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(UserError, match=what):
        chat_samples(messages, characters, train_on="field:w")


@pytest.mark.parametrize("key", [WEIGHT, *SWITCHES])
@pytest.mark.parametrize("off", [False, 0])
def test_keys_of_other_tools_leave_a_turn_out_and_are_not_rendered(characters: Tokenizer, key: str, off: Any) -> None:
    """A missing key means that the turn is trained, with `field:` too."""
    messages = [{k: v for k, v in m.items() if k != "w"} for m in chat(1, 1, 1)]
    plain = trained(characters, messages, "assistant")
    marked = [m | {key: off} if m["content"] in ("a1", "q0") else m for m in messages]
    kept = {text: weight for text, weight in plain.items() if not text.startswith("a1")}
    assert len(kept) == len(plain) - 1
    assert trained(characters, marked, "assistant") == trained(characters, marked, f"field:{key}") == kept
    (with_key,), (without,) = (chat_samples(m, characters) for m in (marked, messages))
    assert with_key.tokens.tolist() == without.tokens.tolist()
    with pytest.raises(UserError, match=f"no turn of the conversation counts: `{key}`"):
        trained(characters, marked[:2] + marked[2:4], "last")
    with pytest.raises(UserError, match=f"has a `{key}` of its own"):
        trained(characters, marked, "all")


@pytest.mark.parametrize("key", AMBIGUOUS)
def test_keys_that_are_not_read_though_they_say_what_is_trained_are_refused(characters: Tokenizer, key: str) -> None:
    messages = [m | {key: True} for m in chat(1)]
    with pytest.raises(UserError, match=f"`{key}`, which"):
        trained(characters, messages, "assistant")
    assert trained(characters, [messages[0] | {key: None}, messages[1]], f"field:{key}"), "a field is named by the user"


def test_a_measured_loss_is_not_taken_for_a_switch(characters: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"`loss`.* false or 0 or 1, not 2\.5"):
        trained(characters, [m | {"loss": 2.5} if "w" in m else m for m in chat(1)], "assistant")


@pytest.mark.parametrize("train_on", ["assistant", "last", "all", "field:w"])
@pytest.mark.parametrize("content", ["", " \n", "<think>\nx\n</think>\n\n"])
def test_a_blank_turn_is_refused_where_it_is_trained(characters: Tokenizer, train_on: str, content: str) -> None:
    messages = chat(1, 1)
    messages[-1]["content"] = content
    with pytest.raises(UserError, match=r"message 3 \(assistant\) is empty"):
        chat_samples(messages, characters, train_on=train_on)
    messages[-1]["weight"] = 0
    if train_on in ("assistant", "field:w"):
        assert trained(characters, messages, train_on) == {"a0<|im_end|>": 1.0}, "as context it may be"


def test_every_token_once_where_a_template_splits(characters: Tokenizer, tmp_path: Any) -> None:
    """A template that shows earlier answers otherwise than they were served:
    what samples have in common is trained in the first of them alone."""
    characters.save(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    tokenizer.hf.chat_template = (
        "{% for m in messages %}<|im_start|><|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}old {% "
        "endif %}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
    )
    first, second = chat_samples(chat(1, 1), tokenizer, train_on="all")
    assert tokenizer.decode(first.tokens[first.loss_weights > 0]) == f"<|user|>q0<|im_end|>{HEAD}a0<|im_end|>"
    assert (
        tokenizer.decode(second.tokens[second.loss_weights > 0])
        == f"old a0<|im_end|><|im_start|><|user|>q1<|im_end|>{HEAD}a1<|im_end|>"
    )
