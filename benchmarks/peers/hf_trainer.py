"""The SFT step of transformers' own Trainer, timed: a peer of benchmarks/train_step.py, run by the Python of
requirements-peers.txt.

Reads a cell of the grid (sft_cell.py) and prints one JSON line. The model makes the logits of all positions; the loss
is its own.
"""

import tempfile
from functools import partial
from typing import Any

from sft_cell import CellClock, InOrder, arguments, documents_of, laid_out, model_of, printed, units_of, weight_of
from transformers import Trainer, TrainingArguments


class Given(InOrder, Trainer): ...


def measured(given: dict[str, Any]) -> dict[str, Any]:
    documents, rows = documents_of(given["documents"])
    units = units_of(given, rows)
    model, clock = model_of(given), CellClock(given["warmup"])
    weight = weight_of(model)
    with tempfile.TemporaryDirectory() as out:
        trainer = Given(
            model=model,
            args=TrainingArguments(**arguments(given, out, len(units)), remove_unused_columns=False),
            train_dataset=units,  # pyright: ignore[reportArgumentType]
            data_collator=partial(laid_out, given, documents=documents),
            callbacks=[clock],
        )
        clock.watch(trainer)
        trainer.train()
    return clock.measured(weight)


if __name__ == "__main__":
    printed(measured)
