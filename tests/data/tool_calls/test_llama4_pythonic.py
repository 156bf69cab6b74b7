"""Llama 4: a list of Python calls."""

import pytest

from tests.data.tool_calls.tables import found


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", {})]),
        ("[f(x=-1, y=+2.5), g(s='it\\'s', t=\"]\")]", [("f", {"x": -1, "y": 2.5}), ("g", {"s": "it's", "t": "]"})]),
        ("[f(a=True, b=true, c=None, d=null)]", [("f", {"a": True, "b": True, "c": None, "d": None})]),
        ("[f(a=[1, (2, 3)], b={'k': {1: 'æ'}})]", [("f", {"a": [1, [2, 3]], "b": {"k": {"1": "æ"}}})]),
        ("[f(s=f'plain', t='a' 'b', u='\\d')]", [("f", {"s": "plain", "t": "ab", "u": "\\d"})]),
        ("[a.b(x=1), _c(y=2),]", [("a.b", {"x": 1}), ("_c", {"y": 2})]),
        ("\n [ f(x=1) ]", [("f", {"x": 1})]),
        ("<|python_start|>[f(x=1)]<|python_end|>", [("f", {"x": 1})]),
    ],
)
def test_calls(text, calls):
    assert found("llama4_pythonic", text) == (None, calls)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "Sure. [f(x=1)]",
        "[]",
        "[1, 2]",
        "[f(1)]",
        "[f(x=1), g(*a)]",
        "[f(x=1), g(**{'a': 1})]",
        "[f(x=y)]",
        "[f(x=g())]",
        "[f(x=1 + 1)]",
        "[f(x=-True)]",
        "[f(x=b'a')]",
        "[f(x=1e999)]",
        "[f(x=f'{a}')]",
        "[f(x=1)",
        "[f(x=1)] done",
        "[f(x='a\nb')]",
        "[f(from=1)]",
        "[f(x=1)]()",
        "[(lambda: 1)()]",
        "[f(x='\0')]",
        "[" * 1_000,
        "[f(x=" + "-" * 50_000 + "1)]",
        "[" + "a." * 50_000 + "b()]",
        "[f(x=" + "{" * 150,
    ],
)
def test_what_is_no_list_of_calls_is_content(text):
    assert found("llama4_pythonic", text) == (text, [])


def test_tags_are_removed_from_content_after_the_start_tag_alone():
    assert found("llama4_pythonic", "<|python_start|>Hi<|python_end|>") == ("Hi", [])
    assert found("llama4_pythonic", "Hi<|python_end|>") == ("Hi<|python_end|>", [])
