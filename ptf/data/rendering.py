"""Settings of how conversations are rendered, beyond the text of a tokenizer's chat template.

Everything that changes a render belongs to the tokenizer. Arguments are written into its template as defaults that a
caller can override, so they hold wherever the tokenizer is loaded, on a server too. The other settings (`Rendering`)
are stored beside the tokenizer in a run's directory.
"""

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptf.errors import UserError

FILE = "rendering.json"  # stored beside a tokenizer of a run; never exported (ptf.model.model_writer.save_hf)
ROW_KEYS = ("template_args", "chat_template_kwargs")  # columns that hold a row's own template arguments
RESERVED = {
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "strftime_now",
    "raise_exception",
}
DATE_FUNCTION = "strftime_now"  # a chat template that has it renders today's date
WAYS_OUT = (
    "give another template in model.chat_template, the template's arguments in model.template_args "
    "(enable_thinking, …), or set data.response_rendering: append, which appends the response to the generation prompt"
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """Rendering settings of a run.

    `date` (ISO) is the day that `strftime_now` returns to a template, None for today; `served` and `allow_unseen` are
    `data.response_rendering: append` and `data.omitted_context: allow`, `consecutive` is `data.consecutive_turns`.
    """

    date: str | None = None
    served: bool = False
    allow_unseen: bool = False
    consecutive: str = "error"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the settings that are not the default, which are part of a fingerprint."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False, "error")}

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that these settings add to a template."""
        if self.date is None:
            return {}
        return {DATE_FUNCTION: datetime.datetime.fromisoformat(self.date).strftime}

    @classmethod
    def read(cls, directory: str | Path) -> "Rendering":
        """Read the settings beside a tokenizer; the defaults where there are none."""
        file = Path(directory) / FILE
        return cls(**json.loads(file.read_text())) if file.is_file() else cls()

    def write(self, directory: str | Path) -> None:
        """Write the settings beside a tokenizer, where they are not the defaults."""
        if self.facts:
            (Path(directory) / FILE).write_text(json.dumps(self.facts))


def with_arguments(template: str, arguments: Mapping[str, Any]) -> str:
    """Return the template with defaults for some of its variables. Raises UserError for an invalid name."""
    return (
        "".join(
            f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
            for name, value in valid_items(arguments)
        )
        + template
    )


def row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template arguments in the row's own columns, without nulls, which columns make.

    Raises UserError for a value that is not an object.
    """
    columns = {key: row[key] for key in ROW_KEYS if row.get(key)}
    if len(columns) > 1:
        raise UserError(f"the row has both `{ROW_KEYS[0]}` and `{ROW_KEYS[1]}`, which mean the same; keep one")
    for key, value in columns.items():
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(f"`{key}` must be an object of the template's arguments, not {str(value)[:60]!r}")
        return dict(valid_items({name: argument for name, argument in parsed.items() if argument is not None}))
    return {}


def valid_items(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the arguments as pairs; raise UserError for a name that no argument can have."""
    for name in arguments:
        if name in RESERVED or name == "self" or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"{name!r} cannot be an argument of a chat template (model.template_args)")
    return list(arguments.items())


def _literal(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
