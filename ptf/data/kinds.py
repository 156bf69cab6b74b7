"""What a row is: its kind, and its columns as the encoders read them.

The one idea: a row is what its columns say, and all rows of a source are of one kind. A column that says something about what is trained is used, or
refused by name; what nothing reads is listed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptf.data.blocks import Reader
from ptf.data.forms import COLUMNS, Columns, Row, advice, recognised, refuse_other_texts, renamed
from ptf.data.messages import MEDIA, Message, as_number, conversation, tools_of, without_nulls
from ptf.data.quarantine import FAULTS
from ptf.data.sources import SourceSpec, rows_once
from ptf.errors import UserError

KINDS = {  # the columns that make a row what it is; a row that could be several is the first
    "preference": ("chosen", "rejected"),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "scored": ("prompt", "completion", "reward"),
    "text": ("text",),
    "events": ("events",),
}
HISTORY = ("messages", "prompt")  # what a preference or a prompt may be given after
CHAT_READS = ("system", "tools", "weight", "template_args", "chat_template_kwargs")
READS = {  # what a kind looks at beside its own columns; of other kinds nothing is passed over
    "preference": (*HISTORY, *CHAT_READS, "margin"),
    "chat": (*CHAT_READS, "label"),
    "completion": (*CHAT_READS, "label", "reward"),
    "scored": ("messages", *CHAT_READS, "label"),
    "text": ("weight",),
    "events": ("weight", "context", "opening", "values"),
}
SAID = {  # the columns that hold messages
    "preference": (*HISTORY, *KINDS["preference"]),
    "chat": ("messages",),
    "completion": KINDS["completion"],
    "scored": (*HISTORY, "completion"),
    "prompt": HISTORY,
}
NUMBERS = ("weight", "reward", "margin", "label")  # that a format of texts (CSV) writes as text
UNREAD_ROWS = 100  # that are asked for their columns


def shaped(row: Row, columns: Columns, kind: str = "auto", columnar: bool = False) -> dict[str, Any]:
    """The row under ptf's names: columns renamed, a known form as its plain one, messages as {role, content}, `system` as the first of them; of an
    explicit kind, without the columns that make it another. `columnar`: as in `conversation`. Raises UserError for a column that is not there, for a
    row that could be several things, and for what cannot be trained."""
    if kind == "tokenized":
        return dict(row)
    found = renamed(row, columns)
    if columnar:
        found |= {name: without_nulls(found[name]) for name in ("tools", "answers") if found.get(name) is not None}
    found = recognised(found, kind)
    of = kind_of(found) if kind == "auto" else kind
    if of != "auto":
        numbers = NUMBERS[:1] if of == "prompt" else NUMBERS  # of a prompt the others are the reward's
        found |= {name: as_number(found[name]) for name in numbers if isinstance(found.get(name), str)}
    if kind == "auto" and of == "text":
        refuse_other_texts(found)
    if of not in ("auto", "events"):
        _refuse_media(found)
    found = _cleaned(found, of, columnar)
    return found if kind == "auto" else _of_kind(found, kind)


def kind_of(row: Row) -> str:
    """What the row's columns say it is; "auto" where they say nothing."""
    return next((kind for kind, names in KINDS.items() if all(row.get(name) is not None for name in names)), "auto")


def found_out(spec: SourceSpec, reader: Reader) -> SourceSpec:
    """The source with what its first row says that its rows are, where the config does not; rows of another kind are then errors, not guesses."""
    if spec.kind != "auto":
        return spec
    for place in rows_once(reader, 1000):  # of which some may be bad
        try:
            return replace(spec, kind=kind_of(shaped(place.read(), spec.columns, columnar=place.columnar)))
        except FAULTS:
            continue
    return spec


def unread(spec: SourceSpec, reader: Reader) -> tuple[str, ...]:
    """The columns of a source's first rows that nothing reads, by their names there; `spec` as it was found out. Online recipes give every column to
    the reward, so of prompts there are none."""
    if spec.kind not in READS:
        return ()
    known = {*KINDS[spec.kind], *READS[spec.kind]}
    found: dict[str, None] = {}
    for place in rows_once(reader, UNREAD_ROWS):
        try:
            row = recognised(renamed(place.read(), spec.columns), spec.kind)
        except FAULTS:
            continue
        found |= dict.fromkeys(name for name in row if name not in known)
    return tuple(found)


def refuse_unwanted(row: Row) -> None:
    """Raises UserError where a `label` says that the answer is not to be imitated."""
    if _labelled(row) == 0:
        raise UserError(
            "`label` says that this answer is not to be imitated: leave such rows out with data.prepare, or learn a score from them "
            f"(recipe rm, kind: scored); {COLUMNS}: {{label: null}} if it says something else"
        )


def _labelled(row: Row) -> float | None:
    """What `label` says of an answer: 1 or 0; None where it says something else."""
    label = row.get("label")
    return float(label) if isinstance(label, int | float) and label in (0, 1) else None


def _cleaned(row: dict[str, Any], kind: str, columnar: bool) -> dict[str, Any]:
    """With every message as {role, content}, `tools` as a list, `system` in its place, and a `label` as a reward."""
    if kind not in SAID:
        return row
    held = [name for name in SAID[kind] if row.get(name) is not None]
    row = row | {name: conversation(row[name], name, columnar) for name in held}
    tools = tools_of(row.get("tools"))
    if "tools" in row:
        row["tools"] = tools
    for given in ("input", "context") if kind in ("completion", "scored", "preference") else ():
        if isinstance(row.get(given), str) and row[given].strip():
            raise UserError(f"`{given}` is not read, though the answer may depend on it: map `instruction` too, or {COLUMNS}: {{{given}: null}} leaves it out")
    if row.get("system"):
        _with_system(row, kind, held)
    for name in held if tools else ():
        _refuse_tools_twice(tools or [], row[name])
    if kind in ("completion", "scored") and row.get("reward") is None and (reward := _labelled(row)) is not None:
        row["reward"] = reward
    return row


def _with_system(row: dict[str, Any], kind: str, held: Sequence[str]) -> None:
    """The row's `system` as the first message of what it belongs to."""
    system = row["system"] if kind == "prompt" else row.pop("system")
    if not isinstance(system, str):
        raise UserError(f"`system` must be a string, not {str(system)[:60]!r}")
    if not system.strip():
        return
    for name in held:
        value = row[name]
        if name == "prompt" and isinstance(value, str):
            row["messages" if kind == "prompt" and "messages" not in held else name] = _led([{"role": "user", "content": value}], system, name)
        elif isinstance(value, list) and (name in HISTORY or any(m.get("role") == "user" for m in value)):
            row[name] = _led(value, system, name)


def _led(messages: list[Message], system: str, name: str) -> list[Message]:
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if not isinstance(first.get("content"), str) or first["content"].strip() != system.strip():
        raise UserError(f"`system` and the first message of `{name}` say different things; {COLUMNS}: {{system: null}} leaves the column out")
    return messages


def _refuse_tools_twice(tools: Sequence[Mapping[str, Any]], messages: Any) -> None:
    """A system message that lists the tools, as some sets have it, and `tools`, of which a template makes such a message."""
    said = [m["content"] for m in messages if m.get("role") == "system" and isinstance(m.get("content"), str)] if isinstance(messages, list) else []
    names = [tool.get("function", tool).get("name") if isinstance(tool.get("function", tool), dict) else None for tool in tools]
    if said and all(isinstance(n, str) and re.search(rf"""["']name["']: *["']{re.escape(n)}["']""", text) for n in names for text in said[:1]):
        raise UserError(
            f"the tools stand in the system message and in `tools`, so a template would show them twice; {COLUMNS}: {{tools: null}} leaves the latter out"
        )


def _refuse_media(row: Row) -> None:
    for name in MEDIA:
        if row.get(name):
            raise UserError(f"`{name}` is part of the row, but ptf trains text only; {COLUMNS}: {{{name}: null}} trains the text without it")


def _of_kind(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Without the columns that make it another."""
    if kind == "scored" and row.get("completion") is None and row.get("messages") is not None:
        kind = "chat"  # the answers inside have the rewards
    wanted = KINDS.get(kind)
    if wanted is None:
        return row
    missing = [name for name in wanted if row.get(name) is None]
    if missing:
        raise UserError(f"a row of kind {kind} needs {' and '.join(f'`{name}`' for name in wanted)}; this one has {sorted(row)} ({advice(row)})")
    others = {name for names in KINDS.values() for name in names} - {*wanted, "reward"} - (set(HISTORY) if kind == "preference" else set())
    return {key: value for key, value in row.items() if key not in others}
