"""Rows of widely used forms, converted to ptf's column names.

Forms that have one interpretation are converted (ShareGPT, Alpaca, function calls). For others the error message names
the config key that says how to read them.
"""

from collections.abc import Mapping
from typing import Any

from ptf.data.messages import normalize_messages, parse_json, tools_of
from ptf.errors import UserError

Row = Mapping[str, Any]
Columns = Mapping[str, str | None]  # ptf's name → the name in the data; None: the column of that name is not used
COLUMNS = "data.sources.NAME.columns"
ADVICE = {  # columns of forms that are ambiguous, and what to do
    "question chosen": f"{COLUMNS}: {{prompt: question}} makes it the prompt",
    "question answer": f"{COLUMNS}: {{prompt: question, completion: answer}} trains the answers; "
    "for online recipes, {prompt: question}",
    "problem solution": f"{COLUMNS}: {{prompt: problem, completion: solution}} trains the solutions; "
    "for online recipes, {prompt: problem}",
    "prompt response": f"{COLUMNS}: {{completion: response}} trains the responses; "
    "kind: scored learns a score, with {reward: its column} too",
    "definition inputs targets": f"{COLUMNS}: {{instruction: definition, input: inputs, output: targets}} "
    "trains the targets",
    "inputs targets": f"{COLUMNS}: {{prompt: inputs, completion: targets}} trains the targets",
    "prompt canonical_solution": f"{COLUMNS}: {{completion: canonical_solution}} trains the solutions; "
    "online recipes read `prompt`",
    "text code": f"{COLUMNS}: {{prompt: text, completion: code}} trains the code; kind: text trains `text` alone",
    "message_id parent_id text": "its rows are messages of a tree: make conversations of them with data.prepare; "
    "kind: text trains each by itself",
    "question input_output": f"for online recipes, {COLUMNS}: {{prompt: question}}; "
    "solutions to imitate are written with data.prepare",
    "problem_statement patch": f"an environment runs it: online recipes, {COLUMNS}: {{prompt: problem_statement}} "
    "and rollout.environment",
    "prompt answers": "several responses to one prompt: write `chosen` and `rejected`, or `completion`, "
    "with data.prepare",
    "chosen rejected": f"recipes dpo and rm learn from pairs; {COLUMNS}: {{completion: chosen}}, or "
    "{messages: chosen}, trains what was chosen",
    "chat": "a conversation that is one text: write `messages` with data.prepare",
    "prompt reward_model": "rows to answer, for online recipes",
}


def rename_columns(row: Row, columns: Columns) -> dict[str, Any]:
    """Return the row with its columns renamed. Raises UserError for a column that is not in the row."""
    missing = [theirs for theirs in columns.values() if theirs is not None and theirs not in row]
    if missing:
        raise UserError(f"there is no column {', '.join(map(repr, missing))}; this row has {sorted(row)}")
    replaced = {ours if theirs is None else theirs for ours, theirs in columns.items()}
    return {key: value for key, value in row.items() if key not in replaced} | {
        ours: row[theirs] for ours, theirs in columns.items() if theirs is not None
    }


def adopt_known_forms(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the row with the columns of known forms under ptf's names."""
    if kind in ("text", "events"):
        return row
    for name in ("messages", "conversations", "conversation"):
        if isinstance(row.get(name), str) and row[name].lstrip().startswith("["):
            row[name] = parse_json(row[name], f"`{name}`")
    _adopt(row, "system", "system_prompt")
    if kind != "completion":
        for name in ("conversations", "conversation"):
            if isinstance(row.get(name), list):
                _adopt(row, "messages", name)
    if row.get("messages") is None:
        _adopt_instruction(row, kind)
        _adopt_tool_calls(row, kind)
    return row


def _adopt(row: dict[str, Any], ours: str, theirs: str) -> None:
    """Rename column `theirs` to `ours`; raise UserError where the row has both and they differ."""
    value = row.get(theirs)
    if value is None:
        return
    if row.get(ours) is not None and normalize_messages(row[ours], ours) != normalize_messages(value, theirs):
        raise UserError(
            f"`{ours}` and `{theirs}` differ; {COLUMNS}: {{{ours}: {theirs}}} takes `{theirs}`, "
            f"{{{theirs}: null}} ignores it"
        )
    row[ours] = row.pop(theirs)


def _adopt_instruction(row: dict[str, Any], kind: str) -> None:
    """Convert Alpaca's and Dolly's columns to `prompt` and `completion`.

    The prompt is the instruction, a blank line, and the input.
    """
    answer, context = ("response", "context") if "context" in row and "output" not in row else ("output", "input")
    pair = all(row.get(name) is not None for name in ("chosen", "rejected"))
    if isinstance(row.get("instruction"), str) and (isinstance(row.get(answer), str) or pair or kind == "prompt"):
        present = [name for name in ("prompt", "completion") if row.get(name) is not None]
        if len(present) == 2 or (present and kind == "prompt"):
            return
        if present:
            raise UserError(
                f"both `instruction` and `{present[0]}` could be what is trained; {COLUMNS}: {{{present[0]}: "
                "null} or {instruction: null} decides"
            )
        if row.get("history"):
            raise UserError(
                f"earlier turns in `history` are not read: write `messages` with data.prepare, or {COLUMNS}: "
                "{history: null} leaves them out"
            )
        parts = [row["instruction"], row.get(context) or ""]
        if not all(isinstance(part, str) for part in parts) or not any(part.strip() for part in parts):
            raise UserError(
                f"`instruction` must not be empty, and `{context}` must be a string, not {str(row.get(context))[:60]!r}"
            )
        row["prompt"] = "\n\n".join(part for part in parts if part.strip())
        if row.get(answer) is not None and not pair:
            row["completion"] = row[answer]
        if kind != "prompt":
            for name in ("instruction", context, *((answer,) if not pair else ())):
                row.pop(name, None)


def _adopt_tool_calls(row: dict[str, Any], kind: str) -> None:
    """Convert a question, tools, and the calls that answer it to `messages`; the latter two may be JSON."""
    query, answers = row.get("query"), row.get("answers")
    if (
        not isinstance(query, str)
        or row.get("tools") is None
        or not isinstance(answers, str | list)
        or row.get("prompt") is not None
    ):
        return
    row["tools"] = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools_of(row["tools"]) or []
    ]
    question = {"role": "user", "content": query}
    if kind == "prompt":
        row["messages"] = [question]
        return
    calls = parse_json(row.pop("answers"), "`answers`")
    if not isinstance(calls, list) or not calls:
        raise UserError("`answers` must be a list of tool calls, or the JSON of one, and not empty")
    row["messages"] = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
    del row["query"]


def advice(row: Row) -> str:
    """Return what to do with a row that lacks the columns of every kind."""
    present = {name for name, value in row.items() if value is not None}
    return next(
        (remedy for names, remedy in ADVICE.items() if present.issuperset(names.split())),
        f"{COLUMNS} maps ptf's column names to the names in the data",
    )


def raise_if_other_texts(row: Row) -> None:
    """Raise UserError for a row whose `text` may be something else than a document."""
    for names, remedy in ADVICE.items():
        if "text" in names.split() and all(row.get(name) is not None for name in names.split()):
            raise UserError(f"`text` is not the only content of this row, which has {sorted(row)}: {remedy}")
