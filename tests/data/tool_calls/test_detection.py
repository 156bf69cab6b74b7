"""The format of a chat template."""

import pytest

from ptf.data.tool_calls import format_of
from ptf.errors import UserError

TAKES_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("excerpt", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>", "glm45"),
        ("<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>", "harmony"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>", "glm47"),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        ("<|start_header_id|>{{ '\"parameters\": ' }}{{ call.arguments | tojson }}", "llama3_json"),
        ("<|header_start|><|python_start|>{{ '\"parameters\": ' }}", "llama3_json"),
        ("<|header_start|>[func_name1(params_name1=params_value1)]", "llama4_pythonic"),
    ],
)
def test_marks(excerpt, name):
    assert format_of(TAKES_TOOLS + excerpt) == name
    assert format_of(excerpt) is None  # the control: it takes no tools


def test_an_unknown_format_is_refused():
    with pytest.raises(UserError, match=r"none of the formats that ptf detects \(harmony, .*give the name"):
        format_of(TAKES_TOOLS + "<calls>{{ message.tool_calls }}</calls>")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("qwen2.5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3-instruct-2507", "hermes"),
        ("qwq-32b", "hermes"),
        ("smollm3", "hermes"),
        ("minimind", "hermes"),
        ("qwen3-coder", "qwen3_coder"),
        ("qwen3.5-think", "qwen3_coder"),
        ("mistral-nemo", "mistral"),
        ("gpt-oss", "harmony"),
        ("phi-3.5", None),
        ("deepseek-r1-distill-qwen", None),
    ],
)
def test_published_templates(shared, file, name):
    assert format_of((shared / f"templates/{file}.jinja").read_text()) == name


def test_a_published_template_of_another_format_is_refused(shared):
    with pytest.raises(UserError, match="none of the formats"):
        format_of((shared / "templates/granite-3.3.jinja").read_text())
