"""Rows of data as pack units to train on, or as prompts to answer.

Encoders are pure functions of a row, and a row's columns say what it is. `Encoder` does the rest in the same way for
every recipe: the row's file, the names of its columns there, and samples that are too long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ptf.data.chat import WEIGHT, TrainOn, chat_samples, clean, in_turns, served_turns, trained_turns
from ptf.data.context import raise_if_unseen
from ptf.data.document import Document, PackUnit, length
from ptf.data.forms import COLUMNS, advice
from ptf.data.kinds import KINDS, label_of, shaped
from ptf.data.messages import finite
from ptf.data.prefixes import prefix_groups
from ptf.data.quarantine import FAULTS, BadRow, reason_of
from ptf.data.rendering import row_arguments
from ptf.data.response_conversation import as_history, differ, history_of, is_conversation, join_answer
from ptf.data.sources.rows import RawRow, SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError

TooLong = Literal["error", "drop", "truncate", "split"]
Row = Mapping[str, Any]
Encode = Callable[[dict[str, Any], str], list[PackUnit]]  # (row, source name); an empty list skips the row
# Called with the counts so far; raises UserError when there are too many bad rows.
SetAside = Callable[[BadRow, Mapping[str, int]], None]
# `too_long` counts the pack units of which nothing was kept, `truncated` those that were cut.
COUNTS = ("rows", "samples", "tokens", "trained", "whole", "too_long", "truncated", "bad", "rows_without_samples")
VALUE = "value/"  # prefix of the per-token values of `values` of events
FORM = 5  # version of what encoders make of a row; data of another version are tokenized again


def encode_document(
    row: Row, tokenizer: Tokenizer, source: str = "", train_on: TrainOn = "assistant"
) -> list[PackUnit]:
    """Encode a row with `messages` (and `tools`), `prompt` and `completion`, `text`, or `events`.

    It becomes one pack unit, or several where a template cannot show all turns of a conversation at once. Raises
    UserError for any other row.
    """
    if "messages" in row or "completion" in row:
        if label_of(row) == 0:
            raise UserError(
                "`label` says that this response is not to be imitated: leave such rows out with data.prepare, "
                f"or learn a score from them (recipe rm, kind: scored); {COLUMNS}: {{label: null}} if the column means "
                "something else"
            )
        tools, arguments = row.get("tools"), row_arguments(row)
        if "messages" in row:
            return [(s,) for s in chat_samples(row["messages"], tokenizer, source, train_on, tools, arguments)]
        if "prompt" in row:
            return [(answer_sample(row["prompt"], row["completion"], tokenizer, source, tools, arguments=arguments),)]
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise UserError("`text` must be a string, and not empty")
        return [(_trained_from(0, tokenizer.begin(row["text"]), tokenizer, source),)]
    if "events" in row:
        return encode_events(row, tokenizer, source)
    raise UserError(
        "a row to train on needs `messages`, `prompt` and `completion`, `text`, or `events`; "
        f"this one has {sorted(row)} ({advice(row)})"
    )


def encode_events(row: Row, tokenizer: Tokenizer, source: str = "") -> list[PackUnit]:
    """Encode a row with `events`, a list of strings and of baskets.

    A string is a token of the vocabulary, or a text of several tokens. A basket is a list of such strings whose order
    has no meaning. The first `context` entries (default 1) have no loss; each later entry is predicted from all entries
    before it. No end token follows the last, because a history has no end. The first event of a basket counts once, and
    every other event `inside` times (default 1). Rows with baskets have the per-token values `baskets` [n, 2]: the
    number of the token's basket, from 1, and of its event in the basket, from 0; both are 0 elsewhere
    (ptf/data/baskets.py). `values` is {name: a number or null for each entry}; it becomes `value/name` [n, 2] of all
    tokens of the entry: the number, and 1 where there is one.
    """
    events, context, inside = row["events"], row.get("context", 1), row.get("inside", 1.0)
    flat: list[Any] = (
        [event for entry in events for event in (entry if isinstance(entry, list) else [entry])]
        if isinstance(events, list)
        else [None]
    )
    if not all(isinstance(event, str) and event for event in flat) or not all(entry for entry in events):
        raise UserError("`events` must be a list of strings and of lists of strings, none of them empty")
    if not isinstance(context, int) or not 0 <= context < len(events):
        raise UserError(
            f"`context` must be a number of events below {len(events)} (those in `events`), not {context!r}"
        )
    if not finite(inside) or inside < 0:
        raise UserError(f"`inside` must be a number of at least 0, not {str(inside)[:60]!r}")
    values = row.get("values") or {}
    if not isinstance(values, dict) or not all(
        isinstance(v, list) and len(v) == len(events) and all(x is None or finite(x) for x in v)
        for v in values.values()
    ):
        raise UserError(
            f"`values` must be {{name: [a number or null for each of the {len(events)} events]}}, "
            f"not {str(values)[:80]}"
        )
    ids = iter(tokenizer.encode_all(flat))
    tokens, weights, baskets, sizes = list[int](), list[float](), list[tuple[int, int]](), list[int]()
    basket = 0
    for index, entry in enumerate(events):
        basket, start = basket + isinstance(entry, list), len(tokens)
        for number in range(len(entry)) if isinstance(entry, list) else (-1,):
            event = next(ids)
            tokens += event
            weights += [0.0 if index < context else 1.0 if number == 0 else inside] * len(event)
            baskets += [(basket, number) if number >= 0 else (0, 0)] * len(event)
        sizes.append(len(tokens) - start)
    weights[0] = 0.0
    if not any(weights):
        raise UserError("nothing to train: one token, or with `inside: 0` no basket after the context")
    token_columns = {"baskets": np.array(baskets, np.int32)} if basket else {}
    token_columns |= {
        VALUE + name: np.repeat(np.array([(x or 0.0, x is not None) for x in v], np.float32), sizes, 0)
        for name, v in values.items()
    }
    return [(Document(np.array(tokens, np.int32), np.array(weights, np.float32), source, token_columns),)]


def encode_preference(row: Row, tokenizer: Tokenizer, source: str = "") -> list[PackUnit]:
    """Encode a row with `chosen` and `rejected` as one pack unit, (chosen, rejected).

    They are responses (a string, a message, or messages) to `prompt` or `messages`, or whole conversations. Only the
    last response of each is trained.
    """
    names = KINDS["preference"]
    if any(name not in row for name in names):
        raise UserError(f"a preference needs `chosen` and `rejected`, this row has {sorted(row)} ({advice(row)})")
    history = history_of(row)
    if history is None and not all(is_conversation(row[name]) for name in names):
        raise UserError(
            "without a `prompt`, `chosen` and `rejected` must be whole conversations; "
            f"this row has {sorted(row)} ({advice({**row, 'rejected': None})})"
        )
    if any(is_conversation(row[name]) for name in names) and differ(
        *(join_answer(history, row[name], name) for name in names)
    ):
        raise UserError("`chosen` and `rejected` answer different prompts")
    for name in names:
        final = row[name][-1] if isinstance(row[name], list) else row[name]
        if isinstance(final, dict) and final.get(WEIGHT) not in (None, 1):
            raise UserError(
                f"the last message of `{name}` has a `weight`, but a pair counts as a whole: give the row a `weight`"
            )
    chosen, rejected = (
        answer_sample(history, row[name], tokenizer, source, row.get("tools"), name, row_arguments(row))
        for name in names
    )
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise UserError("`chosen` and `rejected` are the same")
    return [(chosen, rejected)]


def encode_scored(row: Row, tokenizer: Tokenizer, source: str = "") -> list[PackUnit]:
    """Encode a row with `prompt`, `completion` and a number `reward`, or with `messages` that have rewards.

    In `messages`, those of the assistant have a number `reward` where they were judged. The score is read at the last
    token of each judged response: only that token counts, and there the per-token values `score` and `answer_length`
    [n] hold the reward and the response's number of tokens; elsewhere they are 0. The row becomes one pack unit, or
    several where a template cannot show all turns of a conversation at once.
    """
    tools, arguments = row.get("tools"), row_arguments(row)
    if row.get("messages") is not None:
        messages = in_turns(clean(row["messages"]), tokenizer)
        judged = [(i, m["reward"]) for i, m in enumerate(messages) if m.get("reward") is not None]
        rewards = {i: _reward(value, f"message {i}: `reward`") for i, value in judged}
        for i in rewards:
            if messages[i]["role"] != "assistant":
                raise UserError(
                    f"message {i} ({messages[i]['role']}) has a `reward`, but only what the assistant says is scored"
                )
        if not rewards:
            raise UserError("no message of the assistant's has a `reward`: nothing to learn scores from")
        unscored = [{key: value for key, value in m.items() if key != "reward"} for m in messages]
        plain_messages, counted = trained_turns(unscored, "assistant")
        counted = {i: weight for i, weight in counted.items() if i in rewards}
        if not counted:
            raise UserError("every response that has a `reward` has a `weight` of 0: nothing to learn scores from")
        in_order = iter([rewards[i] for i in counted])
        documents = served_turns(plain_messages, counted, tokenizer, tools, arguments)
        return [
            (_scored(ids, [(t.start, len(t.ids), next(in_order), t.weight) for t in turns], source),)
            for ids, turns in documents
        ]
    if any(row.get(name) is None for name in KINDS["scored"]):
        raise UserError(
            "a scored row needs `prompt`, `completion` and `reward`, or `messages` with rewards; "
            f"this row has {sorted(name for name in row if row[name] is not None)} ({advice(row)})"
        )
    reward = _reward(row["reward"], "`reward`")
    sample = answer_sample(row["prompt"], row["completion"], tokenizer, source, tools, arguments=arguments)
    trained = np.flatnonzero(sample.loss_weights).tolist()
    span = trained[0], trained[-1] + 1, reward, float(sample.loss_weights[trained[-1]])
    return [(_scored(sample.tokens, [span], source),)]


def _reward(value: Any, name: str) -> float:
    """Return a reward as a number. Raises UserError where it is not finite."""
    if not finite(value):
        raise UserError(f"{name} must be a finite number, not {repr(value)[:60]}")
    return float(value)


def _scored(ids: Sequence[int] | np.ndarray, answers: Sequence[tuple[int, int, float, float]], source: str) -> Document:
    """Return a sample of scored responses, each given as (start, end, reward, weight) with its token range."""
    weights, scores, lengths = np.zeros((3, len(ids)), np.float32)
    for start, end, reward, weight in answers:
        weights[end - 1], scores[end - 1], lengths[end - 1] = weight, reward, end - start
    return Document(np.asarray(ids, np.int32), weights, source, {"score": scores, "answer_length": lengths})


def answer_sample(
    history: Any,
    answer: Any,
    tokenizer: Tokenizer,
    source: str,
    tools: Any = None,
    name: str = "completion",
    arguments: Mapping[str, Any] | None = None,
    scored: bool = False,
) -> Document:
    """Return the sample of a response to a prompt, in which only the response, its last message, is trained, or is
    `scored` only, which an empty one may be.

    A string prompt is one user message, as it will be in a chat. With a tokenizer that has no chat template, prompt and
    response are plain text, and the end-of-text token follows. `arguments` are the row's own arguments of the chat
    template.
    """
    if isinstance(history, str) and isinstance(answer, str) and not tokenizer.hf.chat_template:
        if not history or not (scored or answer.strip()):
            raise UserError(f"`{name if history else 'prompt'}` is empty")
        context, ids = tokenizer.begin(history), tokenizer.begin(history + answer)
        if ids[: len(context)] != context:  # a token spans the two; a server encodes the prompt by itself
            ids = context + tokenizer.encode(answer)
        return _trained_from(len(context), ids, tokenizer, source)
    (sample,) = chat_samples(join_answer(history, answer, name), tokenizer, source, "last", tools, arguments, scored)
    return sample


def _trained_from(start: int, ids: list[int], tokenizer: Tokenizer, source: str) -> Document:
    """Return ids of which those from `start` on are trained, and the end-of-text token.

    The first token is never trained, because nothing predicts it.
    """
    eos = tokenizer.hf.eos_token_id
    if eos is None:
        raise UserError("the tokenizer has no end-of-text token, so a text could not end")
    if not ids or ids[-1] != eos:
        ids = [*ids, eos]
    weights = np.ones(len(ids), np.float32)
    weights[: max(1, start)] = 0.0
    return Document(np.array(ids, np.int32), weights, source)


def encode_prompt(row: Row, tokenizer: Tokenizer, source: str, index: int) -> Prompt:
    """Encode a row with `messages` that end before the response, or with `prompt`, as a prompt.

    A `prompt` is such messages, or one user message. The whole row goes to the reward. Raises UserError for any other
    row.
    """
    history = history_of(row)
    if history is None and row.get("messages") is not None:
        raise UserError("the messages of a prompt must end before the response, these end with the assistant's")
    if not isinstance(history, str | list):
        raise UserError(
            f"a prompt row needs `messages` or a string `prompt`, this one has {sorted(row)} ({advice(row)})"
        )
    messages = in_turns(clean(as_history(history)), tokenizer)
    if messages[-1]["role"] == "assistant":
        raise UserError("the messages of a prompt must end before the response, these end with the assistant's")
    tools, arguments = row.get("tools") or None, row_arguments(row)
    text = tokenizer.render_text(messages, True, tools, arguments)
    raise_if_unseen(messages, text, tokenizer, tools, arguments)
    return Prompt(np.array(tokenizer.encode(text), np.int32), dict(row), source, index, row_weight(row))


def limit_length(unit: PackUnit, seq_len: int, too_long: TooLong) -> list[PackUnit]:
    """Return the pack unit so that it fits a sequence: whole, cut, or in pieces of which each is a document.

    The list is empty where the unit is dropped, or where the remaining tokens train nothing.
    """
    if length(unit) <= seq_len:
        return [unit]
    if too_long == "error":
        raise UserError(
            f"{length(unit)} tokens do not fit data.seq_len {seq_len}: raise it, or set data.too_long to drop, "
            "truncate or split"
        )
    if too_long == "drop":
        first, *others = unit
        judged = np.flatnonzero(first.loss_weights[:seq_len])
        if others or "answer_length" not in first.token_columns or not len(judged):
            return []
        return [(first.take(slice(int(judged[-1]) + 1)),)]  # up to the last judged response that fits
    if too_long == "split":
        if len(unit) > 1:
            raise UserError(
                f"{length(unit)} tokens of {len(unit)} samples that belong together cannot be split: "
                "use data.too_long drop or truncate"
            )
        pieces = [sample.take(slice(start, end)) for sample in unit for start, end in _ends(sample, seq_len)]
        return [(piece,) for piece in pieces if piece.loss_weights[1:].any()]
    cut = tuple(s.take(slice(*next(_ends(s, seq_len // len(unit))))) for s in unit)
    return [cut] if all(s.loss_weights[1:].any() for s in cut) else []


def _ends(s: Document, most: int) -> Iterator[tuple[int, int]]:
    """Yield where the pieces of a sample begin and end, each of at most `most` tokens.

    An event of a basket that fits a piece is not cut.
    """
    baskets, start = s.token_columns.get("baskets"), 0
    while start < len(s):
        end = min(start + most, len(s))
        if baskets is not None and end < len(s):
            while end > start and baskets[end, 0] and (baskets[end] == baskets[end - 1]).all():
                end -= 1
            end = end if end > start else start + most
        yield start, end
        start = end


def apply_row_weight(unit: PackUnit, row: Row) -> PackUnit:
    """Return the pack unit with its weights multiplied by the row's `weight`, where it has one."""
    weight = row_weight(row)
    if weight == 1:
        return unit
    weighted = tuple(replace(s, loss_weights=s.loss_weights * np.float32(weight)) for s in unit)
    if not all(np.isfinite(s.loss_weights).all() for s in weighted):
        raise UserError(f"the row's `weight` {weight:g} is too large for those of its messages")
    return weighted


def row_weight(row: Row) -> float:
    """Return the row's own `weight`; 1 where it has none."""
    weight = row.get("weight")
    if weight is None:
        return 1.0
    if not finite(weight) or not np.float32(weight) > 0:
        raise UserError(
            f"the row's `weight` must be a number above 0, not {repr(weight)[:60]}; {COLUMNS}: {{weight: "
            "null} if it says something else"
        )
    return float(weight)


@dataclass(eq=False)
class Encoder:
    """Encodes the rows of one source as pack units that fit a sequence, and counts them.

    `counts["whole"]` is the sum over the rows of the tokens of the row's longest pack unit: tokens / whole is what
    splitting conversations costs. A bad row is an error unless `set_aside` is given.
    """

    encode: Encode  # of rows that are not tokenized
    name: str
    spec: SourceSpec
    seq_len: int
    too_long: TooLong
    _: KW_ONLY
    set_aside: SetAside | None = None
    # the common beginning of a row's samples is encoded once; samples that share one are one pack unit (prefixes.py)
    share_prefixes: bool = False
    # gets each row's values as the file has them and as they are read, and the row
    unread: Callable[[Row, Row, RawRow], None] | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def __call__(self, row: RawRow) -> list[PackUnit]:
        """Return the pack units of a row. A bad row is set aside, or raises UserError with its place."""
        values: Row = {}
        try:
            raw = values = row.read()
            values = shaped(raw, self.spec.columns, self.spec.kind, row.rows.columnar)
            if self.unread is not None:
                self.unread(raw, values, row)
            made = values["units"] if self.spec.kind == "tokenized" else self.encode(values, self.name)
            whole_units = [apply_row_weight(unit, values) for unit in made]
            fitted = [limit_length(unit, self.seq_len, self.too_long) for unit in whole_units]
        except FAULTS as e:
            reason = reason_of(e, values)
            if self.set_aside is None or self.spec.kind == "tokenized":
                raise UserError(f"{row.where} (source {self.name}): {reason}") from (
                    None if isinstance(e, UserError) else e
                )
            self.counts["rows"] += 1
            self.counts["bad"] += 1
            self.counts["rows_without_samples"] += 1
            self.set_aside(BadRow(row.where, reason), self.counts)
            return []
        self.count(whole_units, fitted)
        units = [unit for units in fitted for unit in units]
        if not self.share_prefixes or len(units) < 2 or any(len(unit) > 1 for unit in units):
            return units
        shared = prefix_groups([sample for (sample,) in units], self.seq_len)
        self.counts["tokens"] -= sum(map(length, units)) - sum(map(length, shared))
        return shared

    def count(self, whole_units: Sequence[PackUnit], fitted: Sequence[Sequence[PackUnit]]) -> None:
        """Count a row: its pack units, and what is left of each."""
        counts, longest = self.counts, 0
        for whole, units in zip(whole_units, fitted, strict=True):
            tokens = sum(map(length, units))
            longest = max(longest, tokens)
            counts["samples"] += len(units)
            counts["tokens"] += tokens
            counts["trained"] += sum(int(np.count_nonzero(s.loss_weights)) for unit in units for s in unit)
            counts["too_long"] += not units
            counts["truncated"] += bool(units) and units[0] is not whole
        counts["rows"] += 1
        counts["whole"] += longest
        counts["rows_without_samples"] += not any(fitted)
