"""The kind of a row, and its columns as the encoders read them.

The columns of a row say what it is, and all rows of a source are of one kind. A column that affects what is trained is
used, or refused by name; columns that nothing reads are listed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptf.data.forms import COLUMNS, Columns, Row, adopt_known_forms, advice, raise_if_other_texts, rename_columns
from ptf.data.messages import (
    MEDIA,
    Message,
    as_number,
    normalize_messages,
    raise_if_unprintable,
    tools_of,
    without_nulls,
)
from ptf.data.quarantine import FAULTS
from ptf.data.rendering import ROW_KEYS
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import SourceSpec, rows_once
from ptf.errors import UserError

KINDS = {  # the columns that make a row of a kind; where several kinds match, the first one counts
    "preference": ("chosen", "rejected"),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "scored": ("prompt", "completion", "reward"),
    "text": ("text",),
    "events": ("events",),
}
HISTORY = ("messages", "prompt")  # the columns that a response of a preference, or a prompt, may follow
CHAT_COLUMNS = ("system", "tools", "weight", "template_args", "chat_template_kwargs")
READ_COLUMNS = {  # the columns that a kind reads beside its own; the kinds not listed here read all
    "preference": (*HISTORY, *CHAT_COLUMNS, "margin"),
    "chat": (*CHAT_COLUMNS, "label"),
    "completion": (*CHAT_COLUMNS, "label", "reward"),
    "scored": ("messages", *CHAT_COLUMNS, "label"),
    "text": ("weight",),
    "events": ("weight", "context", "inside", "values"),
}
MESSAGE_COLUMNS = {  # the columns that hold messages
    "preference": (*HISTORY, *KINDS["preference"]),
    "chat": ("messages",),
    "completion": KINDS["completion"],
    "scored": (*HISTORY, "completion"),
    "prompt": HISTORY,
}
NUMBER_COLUMNS = ("weight", "reward", "margin", "label")  # a format of texts (CSV) writes these numbers as text
LABELS = {"yes": 1, "no": 0, "good": 1, "bad": 0}  # what texts other than numbers and booleans say of a response
UNCLEAR = ("accepted", "rejected", "chosen", "positive", "negative", "correct", "incorrect", "right", "wrong", "y", "n")


def shaped(row: Row, columns: Columns, kind: str = "auto", columnar: bool = False) -> dict[str, Any]:
    """Return the row under ptf's names.

    Columns are renamed, known forms are converted, messages become {role, content}, and `system` becomes the first of
    them; a row of an explicit kind loses the columns that make it another. `columnar` is as in `normalize_messages`.
    Raises UserError for a column that is missing, for a row that could be several things, and for content that cannot
    be trained.
    """
    if kind == "tokenized":
        return dict(row)
    result = rename_columns(row, columns)
    if columnar:
        for name in ("tools", "answers"):
            if result.get(name) is not None:
                result[name] = without_nulls(result[name])
    result = adopt_known_forms(result, kind)
    actual = kind_of(result) if kind == "auto" else kind
    if columnar:
        # A template prints these columns, and all columns of a prompt go to the reward as JSON.
        for name in result if actual == "prompt" else (*MESSAGE_COLUMNS.get(actual, ()), "tools", *ROW_KEYS):
            raise_if_unprintable(result.get(name), f"`{name}` ({COLUMNS}: {{{name}: null}} leaves it out)")
    if actual != "auto":
        # The other columns of a prompt belong to the reward.
        numbers = NUMBER_COLUMNS[:1] if actual == "prompt" else NUMBER_COLUMNS
        result |= {name: as_number(result[name]) for name in numbers if isinstance(result.get(name), str)}
    if kind == "auto" and actual == "text":
        raise_if_other_texts(result)
    for name in MEDIA if actual not in ("auto", "events") else ():
        if result.get(name):
            raise UserError(
                f"`{name}` is part of the row, but ptf trains text only; {COLUMNS}: {{{name}: "
                "null} trains the text without it"
            )
    result = _normalized(result, actual, columnar)
    return result if kind == "auto" else _without_other_kinds(result, kind)


def kind_of(row: Row) -> str:
    """Return the kind that the row's columns say; "auto" where they say none."""
    return next((kind for kind, names in KINDS.items() if all(row.get(name) is not None for name in names)), "auto")


def with_detected_kind(spec: SourceSpec, reader: Reader) -> SourceSpec:
    """Return the source with the kind of its first good row, where the config names none.

    Rows of another kind are then errors, not guesses.
    """
    if spec.kind != "auto":
        return spec
    for place in rows_once(reader, 1000):  # some rows may be bad
        try:
            return replace(spec, kind=kind_of(shaped(place.read(), spec.columns, columnar=place.rows.columnar)))
        except FAULTS:
            continue
    return spec


def label_of(row: Row) -> float | None:
    """Return the `label` of a response, 1 or 0; None where it has none, or one that names something else, as a topic.
    Raises UserError for a label that may say whether the response is to be imitated, in another way."""
    label = row.get("label")
    word = label.strip().lower() if isinstance(label, str) else None
    label = LABELS.get(word, label) if word else label
    if word in UNCLEAR or (isinstance(label, int | float) and -1 <= label <= 1 and label not in (0, 1)):
        raise UserError(
            "`label` must say whether the response is to be imitated (true, false, 1, 0, yes, no, good or bad), not "
            f"{label!r}; {COLUMNS}: {{label: null}} if the column means something else"
        )
    return float(label) if isinstance(label, int | float) and label in (0, 1) else None


def _normalized(row: dict[str, Any], kind: str, columnar: bool) -> dict[str, Any]:
    """Return the row with its messages, `tools`, `system` and `label` in ptf's form.

    Messages are {role, content}, `tools` is a list, `system` is the first message, and a `label` becomes a reward.
    """
    if kind not in MESSAGE_COLUMNS:
        return row
    present = [name for name in MESSAGE_COLUMNS[kind] if row.get(name) is not None]
    row = row | {name: normalize_messages(row[name], name, columnar) for name in present}
    tools = tools_of(row.get("tools"))
    if "tools" in row:
        row["tools"] = tools
    for column in ("input", "context") if kind in ("completion", "scored", "preference") else ():
        if isinstance(row.get(column), str) and row[column].strip():
            raise UserError(
                f"`{column}` is not read, though the response may depend on it: map `instruction` too, or {COLUMNS}: "
                f"{{{column}: null}} leaves it out"
            )
    if row.get("system"):
        _with_system(row, kind, present)
    for name in present if tools else ():
        _raise_if_tools_twice(tools or [], row[name])
    if kind in ("completion", "scored") and row.get("reward") is None and (reward := label_of(row)) is not None:
        row["reward"] = reward
    return row


def _with_system(row: dict[str, Any], kind: str, present: Sequence[str]) -> None:
    """Put the row's `system` before the messages that it belongs to."""
    system = row["system"] if kind == "prompt" else row.pop("system")
    if not isinstance(system, str):
        raise UserError(f"`system` must be a string, not {str(system)[:60]!r}")
    if not system.strip():
        return
    for name in present:
        value = row[name]
        if name == "prompt" and isinstance(value, str):
            row["messages" if kind == "prompt" and "messages" not in present else name] = _with_system_message(
                [{"role": "user", "content": value}], system, name
            )
        elif isinstance(value, list) and (name in HISTORY or any(m.get("role") == "user" for m in value)):
            row[name] = _with_system_message(value, system, name)


def _with_system_message(messages: list[Message], system: str, name: str) -> list[Message]:
    """Return the messages with a system message first; raise UserError where they have a different one."""
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if not isinstance(first.get("content"), str) or first["content"].strip() != system.strip():
        raise UserError(
            f"`system` and the first message of `{name}` differ; {COLUMNS}: {{system: null}} leaves the column out"
        )
    return messages


def _raise_if_tools_twice(tools: Sequence[Mapping[str, Any]], messages: Any) -> None:
    """Raise UserError where a system message lists the tools that `tools` holds too.

    A template writes such a message from `tools`, so the tools would be shown twice.
    """
    system_texts = (
        [m["content"] for m in messages if m.get("role") == "system" and isinstance(m.get("content"), str)]
        if isinstance(messages, list)
        else []
    )
    names = [
        tool.get("function", tool).get("name") if isinstance(tool.get("function", tool), dict) else None
        for tool in tools
    ]
    if system_texts and all(
        isinstance(n, str) and re.search(rf"""["']name["']: *["']{re.escape(n)}["']""", text)
        for n in names
        for text in system_texts[:1]
    ):
        raise UserError(
            f"the tools are in the system message and in `tools`, so a template would show them twice; {COLUMNS}: "
            "{tools: null} leaves the latter out"
        )


def _without_other_kinds(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the row without the columns that make it another kind."""
    if kind == "scored" and row.get("completion") is None and row.get("messages") is not None:
        kind = "chat"  # the messages have the rewards
    wanted = KINDS.get(kind)
    if wanted is None:
        return row
    missing = [name for name in wanted if row.get(name) is None]
    if missing:
        raise UserError(
            f"a row of kind {kind} needs {' and '.join(f'`{name}`' for name in wanted)}; "
            f"this one has {sorted(row)} ({advice(row)})"
        )
    others = (
        {name for names in KINDS.values() for name in names}
        - {*wanted, "reward"}
        - (set(HISTORY) if kind == "preference" else set())
    )
    return {key: value for key, value in row.items() if key not in others}
