"""The formats of tool calls by name. Adding one adds a file and a line here."""

import contextlib
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from ptf.data.tool_calls.detection import format_of
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
