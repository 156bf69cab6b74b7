"""The formats of tool calls by name and by chat template. Adding one adds a file and a line here."""

import contextlib
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from ptf.config.tree import near
from ptf.data.tool_calls import (
    glm,
    harmony,
    hermes,
    llama3_json,
    llama4_pythonic,
    mistral,
    openers,
    qwen3_coder,
)
from ptf.data.tool_calls.protocol import Format
from ptf.errors import UserError

QWEN3_CODER = Format(qwen3_coder.parse, partial(openers.certain_if_stripped, marks=qwen3_coder.MARKS))
GLM = Format(glm.parse, partial(openers.certain_if_stripped, marks=(glm.START,)))
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "hermes": Format(hermes.parse, partial(openers.before, marks=(hermes.START,))),
        "qwen3_coder": QWEN3_CODER,
        "qwen3_xml": QWEN3_CODER,
        "llama3_json": Format(llama3_json.parse, llama3_json.certain, ends=("}",)),
        "llama4_pythonic": Format(llama4_pythonic.parse, llama4_pythonic.certain, in_list=True),
        "mistral": Format(mistral.parse, partial(openers.certain_if_stripped, marks=(mistral.MARK,)), in_list=True),
        "glm45": GLM,
        "glm47": GLM,
        "harmony": Format(harmony.parse, harmony.certain, harmony.divide),
    }
)

MARKS = (  # of a chat template, which is searched and not rendered: the first whose marks are all in it
    ("harmony", ("<|channel|>commentary", "functions.")),
    ("glm47", ("{function-name}<arg_key>",)),
    ("glm45", ("<arg_key>", "<arg_value>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_pythonic", ("<|header_start|>", "func_name")),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    ("llama3_json", ("<|header_start|>", '"parameters": ')),
)


def format_of(chat_template: str) -> str | None:
    """Return the name of the format in which a template writes tool calls; None if it takes no tools.

    Raises UserError if it takes tools and writes calls in no known form: the user must then give the name.
    """
    if not re.search(r"\btools\b", chat_template):
        return None
    for name, marks in MARKS:
        if all(mark in chat_template for mark in marks):
            return name
    raise UserError(
        "the chat template takes tools, but writes calls in none of the formats that ptf detects "
        f"({', '.join(dict.fromkeys(name for name, _ in MARKS))}); give the name of the model's format"
    )


def parser(name: str) -> Format:
    """Return the format of that name. Raises UserError for an unknown one, with the nearest name."""
    if name in FORMATS:
        return FORMATS[name]
    raise UserError(f"no format of tool calls is named {name!r}; there are {', '.join(FORMATS)}{near(name, FORMATS)}")


def parser_of(chat_template: object) -> Format | None:
    """Return the format that a chat template asks for; None if it takes no tools, or in no known form."""
    with contextlib.suppress(UserError):
        return FORMATS.get(format_of(str(chat_template or "")) or "")
    return None
