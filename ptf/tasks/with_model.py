"""Rows of any prepare plugin, and a model beside them that is small enough for a CPU."""

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptf.config import Plugin, plugin
from ptf.tasks.tiny import write_model, write_rows


def prepare(
    directory: str,
    *,
    rows: Mapping[str, Any],
    answers: Sequence[str] = (),
    examples: bool = False,
    words: Sequence[str] = (),
    alphabet: str = string.printable[:95] + "\n",
    max_length: int = 512,
    dim: int = 64,
    layers: int = 2,
) -> None:
    """Run the prepare plugin `rows`, `{use: …, args: {…}}`, and write what a small model needs.

    `model/` has a tokenizer with one id for each character of `alphabet` and each of `words`, and the config of a model
    for texts of up to `max_length` of them (see `write_model`). `answers.txt` has the `answers`, for
    `rollout.constrained_decoding`. `examples.jsonl`, with `examples`, has the rows of `train/`, each followed by its
    column `answer`, for SFT.
    """
    plugin.bind(Plugin(**rows))(directory)
    root = Path(directory)
    if answers:
        (root / "answers.txt").write_text("".join(f"{answer}\n" for answer in answers))
    if examples:
        asked = [json.loads(line) for file in sorted((root / "train").glob("*.jsonl")) for line in file.open()]
        write_rows(
            root / "examples.jsonl",
            [{"messages": [*row["messages"], {"role": "assistant", "content": str(row["answer"])}]} for row in asked],
        )
    write_model(root / "model", alphabet, dim=dim, layers=layers, max_length=max_length, words=list(words))
