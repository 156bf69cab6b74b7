"""The formats of tool calls by name and by chat template. Adding one adds a file and a line here."""

import contextlib
import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from ptf.data.tool_calls.glm import Glm
from ptf.data.tool_calls.harmony import Harmony
from ptf.data.tool_calls.hermes import Hermes
from ptf.data.tool_calls.llama3_json import Llama3Json
from ptf.data.tool_calls.llama4_pythonic import Llama4Pythonic
from ptf.data.tool_calls.mistral import Mistral
from ptf.data.tool_calls.protocol import Format
from ptf.data.tool_calls.qwen3_coder import Qwen3Coder
from ptf.errors import UserError

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "hermes": Hermes(),
        "qwen3_coder": Qwen3Coder(),
        "qwen3_xml": Qwen3Coder(),
        "llama3_json": Llama3Json(),
        "llama4_pythonic": Llama4Pythonic(),
        "mistral": Mistral(),
        "glm45": Glm(),
        "glm47": Glm(),
        "harmony": Harmony(),
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
    near = get_close_matches(name, FORMATS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FORMATS)}"
    raise UserError(f"no format of tool calls is named {name!r}; {hint}")


def parser_of(chat_template: object) -> Format | None:
    """Return the format that a chat template asks for; None if it takes no tools, or in no known form."""
    with contextlib.suppress(UserError):
        name = format_of(str(chat_template or ""))
        return parser(name) if name else None
    return None
