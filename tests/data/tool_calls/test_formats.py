"""What each format finds in a text: its content, and its calls."""

import pytest

from ptf.data.tool_calls import ToolCall, parser
from tests.data.tool_calls.tables import TOOLS, found

GLM_LINES = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
GLM = GLM_LINES.replace("\n", "")
HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
LLAMA3 = '{"name": "f", "parameters": {"x": 1}}'
ARRAY = '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}]'
NAMED = '[TOOL_CALLS]f[ARGS]{"n": 1}'
QWEN = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"

CALLS = {
    "glm45": [
        ("no call", "no call", []),
        (GLM_LINES, None, [("f", {"n": 1})]),
        (f"\nSure. \n{GLM}{GLM} done", "Sure.", [("f", {"n": 1})] * 2),
        ("<tool_call>f\n</tool_call>", None, [("f", {})]),
        ("<tool_call>f<arg_key>s</arg_key><arg_value>\n a </arg_value></tool_call>", None, [("f", {"s": "\n a "})]),
        ("<tool_call>g<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", None, [("g", {"n": "1"})]),
        ("<think>Hm.</think>\nHi" + GLM, "<think>Hm.</think>\nHi", [("f", {"n": 1})]),
        ("<tool_call>f<arg_key>n</arg_key><arg_value>1</tool_call>", None, [("f", {"n": 1})]),  # no end of the value
        (GLM.removesuffix("</tool_call>") + GLM, None, [("f", {"n": 1})] * 2),  # no end of the call
        (GLM.removesuffix("</tool_call>"), None, [("f", {"n": 1})]),
        ("<tool_call>f" + GLM, None, [("f", {"n": 1})]),
        (
            "<tool_call>f<arg_key>s</arg_key><arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
            None,
            [("f", {"n": 1})],
        ),
        (GLM + "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg", None, [("f", {"n": 1})]),  # the last is cut
    ],
    "hermes": [
        ("", None, []),
        ("no call", "no call", []),
        (HERMES, None, [("f", {"x": 1})]),
        (f"Sure. \n{HERMES}", "Sure. \n", [("f", {"x": 1})]),
        (f"{HERMES}\n{HERMES} done", None, [("f", {"x": 1})] * 2),
        ('<tool_call>{"name": "f", "arguments": {}}', None, [("f", {})]),  # no end tag, but complete
        (
            '<tool_call>{"arguments": {"s": "å\\n\\"q\\" 東"}, "name": "f"}</tool_call>',
            None,
            [("f", {"s": 'å\n"q" 東'})],
        ),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, [("f", [1])]),  # passed on
    ],
    "llama3_json": [
        ("no call", "no call", []),
        (LLAMA3, None, [("f", {"x": 1})]),
        ('{"name": "f", "arguments": {}, "parameters": {"x": 1}}', None, [("f", {})]),
        (f"<|python_tag|>{LLAMA3}; {LLAMA3}", None, [("f", {"x": 1})] * 2),
        (f"{LLAMA3}{LLAMA3}", None, [("f", {"x": 1})] * 2),
        (f"\n\n{LLAMA3}", None, [("f", {"x": 1})]),
        (f"Sure. {LLAMA3} done", "Sure. ", [("f", {"x": 1})]),
        (f"Sure. <|python_start|>{LLAMA3}<|python_end|>", "Sure. ", [("f", {"x": 1})]),
        ('{"name": "f", "parameters": {"s": "a } { b"}}', None, [("f", {"s": "a } { b"})]),
    ],
    "llama4_pythonic": [
        ("[f()]", None, [("f", {})]),
        (
            "[f(x=-1, y=+2.5), g(s='it\\'s', t=\"]\")]",
            None,
            [("f", {"x": -1, "y": 2.5}), ("g", {"s": "it's", "t": "]"})],
        ),
        ("[f(a=True, b=true, c=None, d=null)]", None, [("f", {"a": True, "b": True, "c": None, "d": None})]),
        ("[f(a=[1, (2, 3)], b={'k': {1: 'æ'}})]", None, [("f", {"a": [1, [2, 3]], "b": {"k": {"1": "æ"}}})]),
        ("[f(s=f'plain', t='a' 'b', u='\\d')]", None, [("f", {"s": "plain", "t": "ab", "u": "\\d"})]),
        ("[a.b(x=1), _c(y=2),]", None, [("a.b", {"x": 1}), ("_c", {"y": 2})]),
        ("\n [ f(x=1) ]", None, [("f", {"x": 1})]),
        ("<|python_start|>[f(x=1)]<|python_end|>", None, [("f", {"x": 1})]),
    ],
    "mistral": [
        ("no call", "no call", []),
        (ARRAY, None, [("f", {"n": 1})]),
        (NAMED, None, [("f", {"n": 1})]),
        (f"Sure. {ARRAY}", "Sure. ", [("f", {"n": 1})]),
        (f" Sure. {NAMED}", "Sure.", [("f", {"n": 1})]),
        (f" \n{ARRAY}", None, [("f", {"n": 1})]),
        ('[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": {}, "id": "a"}]', None, [("f", {}), ("g", {})]),
        ('[TOOL_CALLS]f{"n": 1}[TOOL_CALLS]g [ARGS] {} done', None, [("f", {"n": 1}), ("g", {})]),
        ('[TOOL_CALLS]f[CALL_ID]Ab3dE6gh9[ARGS]{"n": 1}', None, [("f", {"n": 1})]),
        ("[TOOL_CALLS]f[ARGS]", None, [("f", {})]),
        ('[TOOL_CALLS]calls: [{"name": "f"}] done', None, [("f", {})]),
        (ARRAY + ARRAY + NAMED, None, [("f", {"n": 1})] * 3),
        (NAMED + '[TOOL_CALLS]g[ARGS]{"n"', None, [("f", {"n": 1})]),  # the last is cut
    ],
    "qwen3_coder": [
        ("no call", "no call", []),
        (QWEN, None, [("f", {"n": 1})]),
        (f" Sure. \n{QWEN}\n{QWEN} done", "Sure.", [("f", {"n": 1})] * 2),
        ("<function=f></function>", None, [("f", {})]),
        ("<function=f</function>", None, [("f", {})]),
        ("<function=f><parameter=s>\n\n a\nb \n\n</parameter></function>", None, [("f", {"s": "\n a\nb \n"})]),
        ("<function=f><parameter=s>a < b > c & <b></parameter></function>", None, [("f", {"s": "a < b > c & <b>"})]),
        ("<function=f>< parameter = n >1</ parameter></function>", None, [("f", {"n ": "1"})]),
        (
            "<function=g><parameter=n>1</parameter></function>",
            None,
            [("g", {"n": "1"})],  # an unknown tool has no types
        ),
        ("<think>Hm.</think> Hi" + QWEN, "<think>Hm.</think> Hi", [("f", {"n": 1})]),
        # values without an end tag
        ("<function=f><parameter=n>1<parameter=s>a</function>", None, [("f", {"n": 1, "s": "a"})]),
        ("<function=f><parameter=n>1\n</tool_call>" + QWEN, None, [("f", {"n": 1}), ("f", {"n": 1})]),
        # functions without an end tag
        ("<tool_call><function=f><parameter=n>1</parameter></tool_call> x " + QWEN, None, [("f", {"n": 1})] * 2),
        ("<function=f><parameter=n>1</parameter>\n", None, [("f", {"n": 1})]),
        # a value that has such a tag
        ("<function=f><parameter=s>a </tool_call> b</parameter></function>", None, [("f", {"s": "a </tool_call> b"})]),
        # the last is cut
        (QWEN + "<tool_call><function=f><parameter=n>1</parameter><par", None, [("f", {"n": 1})]),
        (QWEN + "<tool_call><function=f", None, [("f", {"n": 1})]),
    ],
}
TOOLS_OF = dict.fromkeys(("hermes", "llama3_json", "llama4_pythonic"), None)  # whose calls say their types
CALLS |= {"glm47": CALLS["glm45"], "qwen3_xml": CALLS["qwen3_coder"]}
NO_CALLS = {
    "glm45": [
        "<tool_call>f",
        "<tool_call></tool_call> done",
        "<tool_call>f<arg_key>",
        "<tool_call>f<arg_key>n</arg_key><arg_value>1",
        "<tool_call><arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>I call f</tool_call>",
    ],
    "hermes": [
        '<tool_call>{"name": "f", "arguments": {"x": 1',
        '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call></tool_call>",
        f"{HERMES}<tool_call>broken</tool_call>",  # all calls, or none
        '<tool_call>{"name": "f", "arguments": ' + "[" * 5_000 + "</tool_call>",
    ],
    "llama3_json": [
        '{"name": "f"',
        '{"name": "f"}',
        "{1, 2}",
        f"{LLAMA3} and {{",
        f'{LLAMA3}; {{"x": 1}}',
        "{'name': 'f'}",
        '{"name": [], "parameters": {}}',
    ],
    "llama4_pythonic": [
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
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]get_wea",
        '[TOOL_CALLS]f[ARGS]{"n": 1',
        "[TOOL_CALLS]f[ARGS]none",
        '[TOOL_CALLS]f{"n": NaN}',
        '[TOOL_CALLS]{"name": "f", "arguments": {}}',
        '[TOOL_CALLS][{"arguments": {}}]',
        '[TOOL_CALLS][{"name": "f"}, 3]',
        '[TOOL_CALLS][{"name": "f"',
        'Hi [TOOL_CALLS]"f"',
        '[{"name": "f"}]',
    ],
    "qwen3_coder": [
        "<tool_call>",
        "<tool_call></tool_call> done",
        "<function=f",
        "<function=f><parameter=n>1",
        "<function=f><parameter=n>1</param",
        "<function=f><parameter=n",
        "<function=><parameter=n>1</parameter></function>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "f</function>",
    ],
}


@pytest.mark.parametrize(("name", "text", "content", "calls"), [(name, *row) for name in CALLS for row in CALLS[name]])
def test_calls(name, text, content, calls):
    assert found(name, text, TOOLS_OF.get(name, TOOLS)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in NO_CALLS for text in NO_CALLS[name]])
def test_what_is_no_call_is_content(name, text):
    assert found(name, text, TOOLS_OF.get(name, TOOLS)) == (text, [])


def test_arguments_can_be_encoded():
    text = '<tool_call>{"name": "f", "arguments": {"s": "é \\ud83c\\udf26 \\ud800"}}</tool_call>'
    assert parser("hermes").parse(text, None).tool_calls == (ToolCall("f", '{"s": "\\u00e9 \\ud83c\\udf26 \\ud800"}'),)
    assert parser("hermes").parse(text.replace("\\ud800", ""), None).tool_calls == (ToolCall("f", '{"s": "é 🌦 "}'),)


def test_tags_are_removed_from_content_after_the_start_tag_alone():
    assert found("llama4_pythonic", "<|python_start|>Hi<|python_end|>") == ("Hi", [])
    assert found("llama4_pythonic", "Hi<|python_end|>") == ("Hi<|python_end|>", [])


def test_arguments_that_fit_their_schema_are_passed_on_as_they_are_written():
    text = '[TOOL_CALLS]f[ARGS]{"n":1,  "x": 1e3, "s": null}'
    assert parser("mistral").parse(text, TOOLS).tool_calls == (ToolCall("f", '{"n":1,  "x": 1e3, "s": null}'),)
    text = '[TOOL_CALLS]f[ARGS]{"n":"1", "x": 1e3}'  # the control
    assert parser("mistral").parse(text, TOOLS).tool_calls == (ToolCall("f", '{"n": 1, "x": 1000.0}'),)
