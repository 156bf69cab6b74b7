"""Rows of forms that are widely used, under ptf's names.

The one idea: a form that leaves one reading is recognised (ShareGPT, Alpaca, calls of functions), and of any other the advice says which key of the config
makes it one that is.
"""

from collections.abc import Mapping
from typing import Any

from ptf.data.messages import conversation, parsed, tools_of
from ptf.errors import UserError

Row = Mapping[str, Any]
Columns = Mapping[str, str | None]  # ptf's name → the name there; None: the column of that name is not used
COLUMNS = "data.sources.NAME.columns"
ADVICE = (  # columns of forms that are not recognised, since others have them too, and what to do
    (("question", "chosen"), f"{COLUMNS}: {{prompt: question}} says that it is asked"),
    (("question", "answer"), f"{COLUMNS}: {{prompt: question, completion: answer}} trains the answers; for online recipes, {{prompt: question}}"),
    (("problem", "solution"), f"{COLUMNS}: {{prompt: problem, completion: solution}} trains the solutions; for online recipes, {{prompt: problem}}"),
    (("prompt", "response"), f"{COLUMNS}: {{completion: response}} trains the responses; kind: scored learns a score, with {{reward: its column}} too"),
    (("definition", "inputs", "targets"), f"{COLUMNS}: {{instruction: definition, input: inputs, output: targets}} trains the targets"),
    (("inputs", "targets"), f"{COLUMNS}: {{prompt: inputs, completion: targets}} trains the targets"),
    (("prompt", "canonical_solution"), f"{COLUMNS}: {{completion: canonical_solution}} trains the solutions; online recipes read `prompt`"),
    (("text", "code"), f"{COLUMNS}: {{prompt: text, completion: code}} trains the code; kind: text trains `text` alone"),
    (("message_id", "parent_id", "text"), "its rows are messages of a tree: make conversations of them with data.prepare; kind: text trains each by itself"),
    (("question", "input_output"), f"for online recipes, {COLUMNS}: {{prompt: question}}; solutions to imitate are written with data.prepare"),
    (("problem_statement", "patch"), f"an environment plays it: online recipes, {COLUMNS}: {{prompt: problem_statement}} and rollout.environment"),
    (("prompt", "answers"), "several answers to one prompt: write `chosen` and `rejected`, or `completion`, with data.prepare"),
    (("chosen", "rejected"), f"recipes dpo and rm learn from pairs; {COLUMNS}: {{completion: chosen}}, or {{messages: chosen}}, trains what was chosen"),
    (("chat",), "a conversation that is one text: write `messages` with data.prepare"),
    (("prompt", "reward_model"), "rows to answer, for online recipes"),
)  # fmt: skip


def renamed(row: Row, columns: Columns) -> dict[str, Any]:
    missing = [there for there in columns.values() if there is not None and there not in row]
    if missing:
        raise UserError(f"there is no column {', '.join(map(repr, missing))}; this row has {sorted(row)}")
    gone = {ours if there is None else there for ours, there in columns.items()}
    return {key: value for key, value in row.items() if key not in gone} | {ours: row[there] for ours, there in columns.items() if there is not None}


def recognised(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """With the columns of known forms under ptf's names."""
    if kind in ("text", "events"):
        return row
    for name in ("messages", "conversations", "conversation"):
        if isinstance(row.get(name), str) and row[name].lstrip().startswith("["):
            row[name] = parsed(row[name], f"`{name}`")
    _adopt(row, "system", "system_prompt")
    if kind != "completion":
        for name in ("conversations", "conversation"):
            if isinstance(row.get(name), list):
                _adopt(row, "messages", name)
    if row.get("messages") is None:
        _instructed(row, kind)
        _called(row, kind)
    return row


def _adopt(row: dict[str, Any], ours: str, there: str) -> None:
    value = row.get(there)
    if value is None:
        return
    if row.get(ours) is not None and conversation(row[ours], ours) != conversation(value, there):
        raise UserError(f"`{ours}` and `{there}` say different things; {COLUMNS}: {{{ours}: {there}}} or {{{there}: null}} decides")
    row[ours] = row.pop(there)


def _instructed(row: dict[str, Any], kind: str) -> None:
    """Alpaca's columns and Dolly's as `prompt` and `completion`: what is asked, a blank line, and what it is asked of."""
    answer, given = ("response", "context") if "context" in row and "output" not in row else ("output", "input")
    pair = all(row.get(name) is not None for name in ("chosen", "rejected"))
    if isinstance(row.get("instruction"), str) and (isinstance(row.get(answer), str) or pair or kind == "prompt"):
        there = [name for name in ("prompt", "completion") if row.get(name) is not None]
        if len(there) == 2 or (there and kind == "prompt"):
            return
        if there:
            raise UserError(f"both `instruction` and `{there[0]}` could be what is trained; {COLUMNS}: {{{there[0]}: null}} or {{instruction: null}} decides")
        if row.get("history"):
            raise UserError(f"earlier turns in `history` are not read: write `messages` with data.prepare, or {COLUMNS}: {{history: null}} leaves them out")
        asked = [row["instruction"], row.get(given) or ""]
        if not all(isinstance(part, str) for part in asked) or not any(part.strip() for part in asked):
            raise UserError(f"`instruction` must say something, and `{given}` must be a string, not {str(row.get(given))[:60]!r}")
        row["prompt"] = "\n\n".join(part for part in asked if part.strip())
        if row.get(answer) is not None and not pair:
            row["completion"] = row[answer]
        if kind != "prompt":
            for name in ("instruction", given, *((answer,) if not pair else ())):
                row.pop(name, None)


def _called(row: dict[str, Any], kind: str) -> None:
    """A question, tools, and the calls that answer it, each of the latter two perhaps as JSON, as `messages`."""
    query, answers = row.get("query"), row.get("answers")
    if not isinstance(query, str) or row.get("tools") is None or not isinstance(answers, str | list) or row.get("prompt") is not None:
        return
    tools = tools_of(row["tools"]) or []
    row["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    asked = {"role": "user", "content": query}
    if kind == "prompt":
        row["messages"] = [asked]
        return
    calls = parsed(row.pop("answers"), "`answers`")
    if not isinstance(calls, list) or not calls:
        raise UserError("`answers` must be a list of tool calls, or the JSON of one, and not empty")
    row["messages"] = [asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    del row["query"]


def advice(row: Row) -> str:
    """What to do with a row that says nothing, or not enough."""
    there = {name for name, value in row.items() if value is not None}
    return next((said for names, said in ADVICE if there.issuperset(names)), f"{COLUMNS} says what they are called there")


def refuse_other_texts(row: Row) -> None:
    """Of a row whose `text` may be something else than a document."""
    for names, said in ADVICE:
        if "text" in names and all(row.get(name) is not None for name in names):
            raise UserError(f"`text` is not all that this row says, it has {sorted(row)}: {said}")
