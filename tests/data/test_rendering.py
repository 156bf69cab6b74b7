"""What a job says of rendering: a template and its arguments, written into the tokenizer; the date;
where a turn ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ptf.data.chat import chat_samples
from ptf.data.rendering import DATE_FUNCTION, Rendering, with_arguments
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.conversations import said
from tests.data.templates import bytes_tokenizer, templated

CHAT = [said("user", "a"), said("assistant", "b")]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab%}{\"'\\\n", max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_arguments_are_defaults_of_any_value(characters: Tokenizer, value: Any) -> None:
    template = with_arguments(
        "{% macro m() %}{{ x | tojson }}{% endmacro %}{% for n in [1] %}{{ m() }}{% endfor %}\n", {"x": value}
    )
    render = characters.hf.apply_chat_template
    assert json.loads(render(CHAT, chat_template=template, tokenize=False)) == value
    assert json.loads(render(CHAT, chat_template=template, tokenize=False, x="other")) == "other"


def test_a_template_that_is_given_renders_the_same_once_saved(tmp_path: Path) -> None:
    made = Tokenizer(bytes_tokenizer())
    made.set_template(templated("thinking_switch").hf.chat_template, {"enable_thinking": False})
    made.save(tmp_path)
    served = AutoTokenizer.from_pretrained(tmp_path)
    text = served.apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    assert text.endswith("<think></think>")
    assert text == made.render_text(CHAT[:1], True)
    assert Tokenizer.load(str(tmp_path)).identity == made.identity
    assert not (tmp_path / "rendering.json").exists()


def dated(date: str | None, template: str = "date") -> Tokenizer:
    tokenizer = Tokenizer(templated(template).hf)
    tokenizer.rendering = Rendering(date)
    return tokenizer


def test_the_date_is_what_it_is_told_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    one, other = dated("2026-02-03"), dated("2026-02-04")
    assert "Today is 03 February 2026." in one.render_text(CHAT, False)
    assert one.render(CHAT, False) != other.render(CHAT, False)
    assert one.identity != other.identity
    with pytest.raises(
        UserError,
        match=r"it was made with a chat template that rendered the date 2026-02-03, not 2026-02-04: set data\.date",
    ):
        other.raise_if_different(one.identity, "it")
    one.save(tmp_path)
    again = Tokenizer.load(str(tmp_path))
    assert again.render_text(CHAT, False) == one.render_text(CHAT, False)
    again.raise_if_different(json.loads(json.dumps(one.identity)), "it")
    assert DATE_FUNCTION in one.hf.chat_template
    assert DATE_FUNCTION not in templated("plain").hf.chat_template


def test_a_template_that_wants_a_system_message_has_its_stop_found() -> None:
    assert templated("system_required").decode([templated("system_required").stop_ids[0]]) == "<|end|>"


def test_of_two_stops_the_one_at_which_a_server_stops_is_trained() -> None:
    tokenizer = templated("two_stops")
    assert [tokenizer.decode([i]) for i in tokenizer.stop_ids] == ["<|turn_end|>"]
    (sample,) = chat_samples(CHAT, tokenizer)
    assert tokenizer.decode(sample.tokens[sample.loss_weights > 0]) == "<|response_start|>b<|response_end|><|turn_end|>"
    # a generation config that stops earlier
    other = Tokenizer(templated("two_stops").hf, extra_stops=tokenizer.encode("<|response_end|>"))
    assert other.decode([other.stop_ids[0]]) == "<|response_end|>"


def test_saving_keeps_all_of_the_generation_config(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path / "a")
    (tmp_path / "a/generation_config.json").write_text('{"eos_token_id": [3, 7], "temperature": 0.6}')
    Tokenizer.load(str(tmp_path / "a")).save(tmp_path / "b")
    assert json.loads((tmp_path / "b/generation_config.json").read_text()) == {
        "eos_token_id": [3, 7],
        "temperature": 0.6,
    }
