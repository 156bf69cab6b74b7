"""One row of data as atoms to train on, or as a prompt to answer.

The one idea: encoders are pure functions of a row. Which file the row came from, and what happens to a sample that is too long, is the
affair of `Encoder`, the same for every recipe.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ptf.data.chat import TrainOn, chat_samples, clean
from ptf.data.sample import Atom, Sample, length
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError

TooLong = Literal["error", "drop", "truncate"]
Encode = Callable[[dict[str, Any], str], list[Atom]]  # (row, source name); an empty list skips the row
COUNTS = ("rows", "samples", "tokens", "trained", "whole", "dropped", "truncated")


def encode_chat(row: Mapping[str, Any], tokenizer: Tokenizer, source: str = "", train_on: TrainOn = "assistant") -> list[Atom]:
    """A row with `messages` (and `tools`, where it has them): one atom, or several where the template cannot show all turns at once."""
    if "messages" not in row:
        raise UserError(f"a chat row needs `messages`, this one has {sorted(row)}")
    return [(sample,) for sample in chat_samples(row["messages"], tokenizer, source, train_on, row.get("tools"))]


def encode_prompt(row: Mapping[str, Any], tokenizer: Tokenizer, source: str, index: int) -> Prompt:
    """A row with `messages` that end before the answer, or with `prompt`, one user message. The whole row goes to the reward."""
    if isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    elif "messages" in row:
        messages = clean(row["messages"])
    else:
        raise UserError(f"a prompt row needs `messages` or a string `prompt`, this one has {sorted(row)}")
    if messages[-1]["role"] == "assistant":
        raise UserError("the messages of a prompt must end before the answer, these end with the assistant's")
    return Prompt(np.array(tokenizer.render(messages, True, row.get("tools") or None), np.int32), row, source, index)


def fit(atom: Atom, seq_len: int, too_long: TooLong) -> Atom | None:
    """The atom, if need be cut so that it fits a row; None where it is dropped, or where nothing of it that is trained would be left."""
    if length(atom) <= seq_len:
        return atom
    if too_long == "error":
        raise UserError(f"{length(atom)} tokens do not fit data.seq_len {seq_len}: raise it, or set data.too_long to drop or truncate")
    if too_long == "drop":
        return None
    room = seq_len // len(atom)
    cut = tuple(Sample(s.tokens[:room], s.weights[:room], s.source, {k: v[:room] for k, v in s.streams.items()}) for s in atom)
    return cut if all(s.weights[1:].any() for s in cut) else None


class Encoder:
    """Turns a row into atoms that fit, and counts. `whole` are the tokens of each row's longest atom: tokens / whole is what splitting conversations cost."""

    def __init__(self, encode: Encode, name: str, seq_len: int, too_long: TooLong):
        self._encode, self._name, self._seq_len = encode, name, seq_len
        self._too_long: TooLong = too_long
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)

    def __call__(self, place: tuple[dict[str, Any], str]) -> list[Atom]:
        row, where = place
        try:
            whole = self._encode(row, self._name)
            atoms = [fit(atom, self._seq_len, self._too_long) for atom in whole]
        except UserError as e:
            raise UserError(f"{where} (source {self._name}): {e}") from None
        kept = [atom for atom in atoms if atom is not None]
        self.counts["rows"] += 1
        self.counts["samples"] += len(kept)
        self.counts["tokens"] += sum(length(atom) for atom in kept)
        self.counts["trained"] += sum(int((s.weights != 0).sum()) for atom in kept for s in atom)
        self.counts["whole"] += max((length(atom) for atom in kept), default=0)
        self.counts["dropped"] += len(atoms) - len(kept)
        self.counts["truncated"] += sum(a is not None and a is not b for a, b in zip(atoms, whole, strict=True))
        return kept
