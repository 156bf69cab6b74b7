"""The documents of a step whose loss or gradient was not finite, written for inspection."""

import json
from collections.abc import Sequence
from pathlib import Path

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.tokenizer import Tokenizer

MOST = 10  # so many consecutive steps without a finite loss end the run


def write_documents(run: Path, step: int, batches: Sequence[Batch], tokenizer: Tokenizer, world: World) -> Path:
    """Write this rank's documents of the step and return the directory of all ranks.

    Each document is one JSON object on a line, with its ids and its text.
    """
    directory = run / "nonfinite" / f"step_{step:08}"
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for batch in batches:
        tokens, segments = batch.tokens[batch.segments >= 0], batch.segments[batch.segments >= 0]
        for document, (source, length) in enumerate(zip(batch.sources, batch.lengths, strict=True)):
            ids = tokens[segments == document].tolist()
            assert len(ids) == length
            lines.append(json.dumps({"source": source, "tokens": ids, "text": tokenizer.decode(ids)}) + "\n")
    (directory / f"rank_{world.rank:05}.jsonl").write_text("".join(lines))
    return directory
