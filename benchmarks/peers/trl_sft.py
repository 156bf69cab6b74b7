"""TRL's SFT step, timed: a peer of benchmarks/train_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads one JSON object from the command line: model directory, documents (.npz), whether sequences are packed, sequences
(or documents) a pass, sequences a step, steps, warm-up, dtype, learning rate; prints one JSON line. Sequences are
packed already, as the trainer's own packing would hold them (`seq_lengths`), and are taken in their order.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback, logging
from trl import SFTConfig, SFTTrainer


class Memory:
    """What is resident beyond what was when this was made, at most."""

    def __init__(self) -> None:
        self.base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here

    def added_mib(self) -> float:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024 - self.base


def documents_of(path: str) -> tuple[list[Tensor], list[list[int]]]:
    """The documents, and the numbers of those of each sequence."""
    stored = np.load(path)
    documents = [
        torch.from_numpy(part.astype(np.int64))
        for part in np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
    ]
    ends = np.cumsum(stored["rows"])
    return documents, [list(range(end - n, end)) for end, n in zip(ends.tolist(), stored["rows"].tolist(), strict=True)]


def labels_of(document: Tensor) -> Tensor:
    """The first 40 % is prompt."""
    return torch.where(torch.arange(len(document)) >= 0.4 * len(document), document, -100)


def packed(rows: list[list[int]], documents: list[Tensor]) -> dict[str, Tensor]:
    """Sequences of equal lengths as a batch, positions by document; shorter ones are filled up with documents of one
    token."""
    width = max(sum(len(documents[i]) for i in row) for row in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            n = len(documents[i])
            ids[r, at : at + n], labels[r, at : at + n], positions[r, at : at + n] = (
                documents[i],
                labels_of(documents[i]),
                torch.arange(n),
            )
            at += n
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def tokenizer() -> PreTrainedTokenizerFast:
    """The trainer wants one, though the documents are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {str(i): i for i in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1", unk_token="0"
    )


class Given(SFTTrainer):
    """With sequences that need no preparing, in their order."""

    def _get_train_sampler(self, *more):
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    def __init__(self, warmup: int) -> None:
        self.warmup, self.cpu, self.losses, self.memory = warmup, [], [], None

    def on_step_begin(self, args, state, control, **more) -> None:
        self.memory = self.memory or Memory()
        self.began = time.process_time()

    def on_step_end(self, args, state, control, **more) -> None:
        if state.global_step > self.warmup:
            self.cpu.append(time.process_time() - self.began)

    def on_log(self, args, state, control, logs=None, **more) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    documents, rows = documents_of(given["documents"])
    if not given["packed"]:
        rows = [[i] for row in rows for i in row]
    joined = [
        {
            "input_ids": torch.cat([documents[i] for i in row]).tolist(),
            "labels": torch.cat([labels_of(documents[i]) for i in row]).tolist(),
            "seq_lengths": [len(documents[i]) for i in row],
        }
        for row in rows
    ]
    data = Dataset.from_list(
        [row if given["packed"] else {k: v for k, v in row.items() if k != "seq_lengths"} for row in joined]
    )
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32, attn_implementation="sdpa")
    clock, total = Clock(given["warmup"]), given["steps"] + given["warmup"]
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            output_dir=out,
            max_steps=total,
            per_device_train_batch_size=given["pass"],
            gradient_accumulation_steps=len(rows) // total // given["pass"],
            max_length=given["width"],
            packing=given["packed"],
            packing_strategy="bfd",
            bf16=given["dtype"] == "bf16",
            fp16=False,
            use_cpu=True,
            learning_rate=given["lr"],
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            logging_first_step=True,
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        trainer = Given(model=model, args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[clock])
        real: list[int] = []
        inner = trainer.training_step

        def counted(model, inputs, *more):
            real.append(
                int(inputs["input_ids"].numel() if "attention_mask" not in inputs else inputs["attention_mask"].sum())
            )
            return inner(model, inputs, *more)

        trainer.training_step = counted
        trainer.train()
    passes = len(real) // total
    tokens = [sum(real[i : i + passes]) for i in range(0, len(real), passes)]
    assert clock.memory is not None
    print(
        json.dumps(
            {
                "cpu_s": clock.cpu,
                "tokens": tokens[given["warmup"] :],
                "losses": clock.losses,
                "added_mib": clock.memory.added_mib(),
            }
        )
    )


if __name__ == "__main__":
    main()
