"""TRL's SFT step, timed: a peer of benchmarks/train_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads a cell of the grid (sft_cell.py) and prints one JSON line. Sequences are packed already, as the trainer's own
packing would hold them (`seq_lengths`), and are taken in their order.
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from sft_cell import (
    CellClock,
    InOrder,
    arguments,
    documents_of,
    labels_of,
    model_of,
    printed,
    tokenizer,
    units_of,
    weight_of,
)
from trl import SFTConfig, SFTTrainer


class Given(InOrder, SFTTrainer): ...


def measured(given: dict[str, Any]) -> dict[str, Any]:
    documents, rows = documents_of(given["documents"])
    units, form = units_of(given, rows), given["form"]
    data = Dataset.from_list(
        [
            {
                "input_ids": torch.cat([documents[i] for i in unit]).tolist(),
                "labels": torch.cat([labels_of(documents[i]) for i in unit]).tolist(),
            }
            | ({"seq_lengths": [len(documents[i]) for i in unit]} if form == "packed" else {})
            for unit in units
        ]
    )
    model, clock = model_of(given), CellClock(given["warmup"])
    weight = weight_of(model)
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            **arguments(given, out, len(units)),
            max_length=None if form == "padding-free" else given["width"],
            packing=form == "packed",
            packing_strategy="bfd",
            padding_free=form == "padding-free",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = Given(model=model, args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[clock])
        clock.watch(trainer)
        trainer.train()
    return clock.measured(weight)


if __name__ == "__main__":
    printed(measured)
