"""TRL's SFT step, timed: a peer of benchmarks/train_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads a cell of the grid (sft_cell.py) and prints one JSON line. Sequences are packed already, as the trainer's own
packing would hold them (`seq_lengths`), and are taken in their order.
"""

import tempfile
from typing import Any

import sft_cell
import torch
from datasets import Dataset
from sft_cell import labels_of
from trl import SFTConfig, SFTTrainer


class Given(sft_cell.InOrder, SFTTrainer): ...


def measured(given: dict[str, Any]) -> dict[str, Any]:
    documents, rows = sft_cell.documents_of(given["documents"])
    units, form = sft_cell.units_of(given, rows), given["form"]
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
    model, clock, tokenizer = sft_cell.model_of(given), sft_cell.CellClock(given["warmup"]), sft_cell.tokenizer()
    weight = sft_cell.weight_of(model)
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            **sft_cell.arguments(given, out, len(units)),
            max_length=None if form == "padding-free" else given["width"],
            packing=form == "packed",
            packing_strategy="bfd",
            padding_free=form == "padding-free",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = Given(model=model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
        clock.watch(trainer)
        trainer.train()
    return clock.measured(weight)


if __name__ == "__main__":
    sft_cell.printed(measured)
