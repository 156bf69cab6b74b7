"""Tags inside a value are part of it: a value ends where its own form or the grammar says so."""

import pytest

from ptf.data.tool_calls import FORMATS
from tests.data.tool_calls.sampled_texts import RENDERERS, Random
from tests.data.tool_calls.tables import TOOLS, found

QUOTED = {
    "hermes": ["end a call with </tool_call>.", "<tool_call>", '</tool_call> "and" <tool_call>'],
    "glm45": ["end a call with </tool_call>.", "</arg_value>", "a </arg_value> b", "</arg_key> c", "<tool_call>f"],
    "qwen3_coder": [
        "end a call with </tool_call>.",
        "</parameter> ends one, </function> the other",
        "</parameter>",
        "</function>.",
        "<function=g>",
        "set <parameter=x>1</parameter> there",
    ],
    "mistral": ["[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]"],
    "harmony": ["a <|call|> b", "<|end|>", "<|start|>assistant"],
    "llama3_json": ['} {"name": "g", "parameters": {}}', "<|python_tag|>"],
    "llama4_pythonic": [")] [g()", "a <|python_end|> b"],
}
QUOTED |= {"glm47": QUOTED["glm45"], "qwen3_xml": QUOTED["qwen3_coder"]}


@pytest.mark.parametrize("name", FORMATS)
def test_no_value_is_cut_by_a_tag_in_it_and_no_call_is_lost(name):
    compared = 0
    for said in QUOTED[name]:
        calls, plain = ([("f", {"s": s, "n": 1}), ("f", {"s": s}), ("f", {"n": 2})] for s in (said, "plain"))
        for seed in range(12):  # other forms of the same calls
            text, other = ("".join(RENDERERS[name](Random(seed), made)) for made in (calls, plain))
            if found(name, other, TOOLS)[1] != plain:  # not every form that models write is read
                continue
            if "<parameter=x>" in said and "\n<parameter" not in text:  # only lines tell it from a missing end tag
                continue
            compared += 1
            assert found(name, text, TOOLS)[1] == calls, text
    assert compared > 10


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "hermes"])
def test_a_text_that_ends_inside_a_value_with_a_tag_is_no_call(name):
    for said in QUOTED[name]:
        (text,) = RENDERERS[name](Random(0), [("f", {"s": f"{said} and more"})])
        cut = text[: text.index("nd more")]
        assert found(name, cut, TOOLS) == (cut, [])
