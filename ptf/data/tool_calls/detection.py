"""The format of tool calls that a chat template asks a model for.

The template is searched for the marks that each format alone has; it is not rendered.
"""

import re

from ptf.errors import UserError

MARKS = (  # the first whose marks are all in the template
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
