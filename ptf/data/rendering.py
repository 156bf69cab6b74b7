"""How conversations are rendered, beyond the words of a tokenizer's chat template.

The one idea: everything that changes a render belongs to the tokenizer. Arguments are written into its template, as defaults that a caller can still
override, so they hold wherever the tokenizer is loaded, on a server too. The rest (`Rendering`) lies beside the tokenizer in a run's directory.
"""

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptf.errors import UserError

FILE = "rendering.json"  # beside a tokenizer of a run; never exported (ptf.model.bridge.save_hf)
ROW_KEYS = ("template_args", "chat_template_kwargs")  # columns of a row that hold arguments of its own
RESERVED = {
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception",
}  # fmt: skip
WAYS_OUT = (
    "give model.chat_template a template that does, the template's own arguments in model.template_args (enable_thinking, …), "
    "or set data.render: served, which trains what the model shall say behind the served prompt"
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """Settings of a run. `date` (ISO) is the day that `strftime_now` gives to a template, today without; `served` and `allow_unseen` are
    `data.render: served` and `data.unseen_context: allow`."""

    date: str | None = None
    served: bool = False
    allow_unseen: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """Those that are not the default: what a fingerprint has to know."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def arguments(self) -> dict[str, Any]:
        """What the template is handed."""
        if self.date is None:
            return {}
        day = datetime.datetime.fromisoformat(self.date)
        return {"strftime_now": day.strftime}

    @classmethod
    def read(cls, directory: str | Path) -> "Rendering":
        file = Path(directory) / FILE
        return cls(**json.loads(file.read_text())) if file.is_file() else cls()

    def write(self, directory: str | Path) -> None:
        if self.facts:
            (Path(directory) / FILE).write_text(json.dumps(self.facts))


def renders_date(template: object) -> bool:
    """Whether a chat template (or a dictionary of them) asks for today's date."""
    return "strftime_now" in str(template)


def with_arguments(template: str, arguments: Mapping[str, Any]) -> str:
    """The template with defaults for some of its variables. Raises UserError for a name that no argument can have."""
    return "".join(f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n" for name, value in _checked(arguments)) + template


def row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """The template arguments that a row has of its own; nulls, which columns make, are none. Raises UserError for what is not an object."""
    given = {key: row[key] for key in ROW_KEYS if row.get(key)}
    if len(given) > 1:
        raise UserError(f"the row has both `{ROW_KEYS[0]}` and `{ROW_KEYS[1]}`, which mean the same; keep one")
    for key, value in given.items():
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"`{key}` must be an object of the template's arguments, not {str(value)[:60]!r}")
        return dict(_checked({name: argument for name, argument in found.items() if argument is not None}))
    return {}


def _checked(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    for name in arguments:
        if name in RESERVED or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"{name!r} cannot be an argument of a chat template (model.template_args)")
    return list(arguments.items())


def _literal(value: Any) -> str:
    """A value as Jinja writes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
