"""What the peers of benchmarks/train_step.py share: documents laid out as passes, the clock, and the line that each
prints.

A peer reads one JSON object from the command line, which is a cell of the grid: model directory, documents (.npz), how
the documents of a pass lie (`form`), sequences or documents a pass (`pass`), sequences a step (`rows`), untimed steps
(`warmup`), timed ones (`steps`), dtype, learning rate, `attention` (transformers' name), `compile`, `liger`.
"""

import json
import os
import resource
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback, logging


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


def units_of(given: dict[str, Any], rows: list[list[int]]) -> list[list[int]]:
    """What a pass has so many of: the documents of each sequence, or every document alone."""
    return rows if given["form"] == "packed" else [[i] for row in rows for i in row]


def packed(rows: Sequence[Sequence[int]], documents: list[Tensor]) -> dict[str, Tensor]:
    """Sequences as a batch, positions by document; shorter ones are filled up with documents of one token."""
    width = max(sum(len(documents[i]) for i in row) for row in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            n = len(documents[i])
            ids[r, at : at + n], labels[r, at : at + n] = documents[i], labels_of(documents[i])
            positions[r, at : at + n] = torch.arange(n)
            at += n
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def laid_out(given: dict[str, Any], units: list[list[int]], documents: list[Tensor]) -> dict[str, Tensor]:
    """A pass: packed sequences [pass, width], documents end to end in one sequence, or one document without positions,
    whose attention needs no mask."""
    if given["form"] == "packed":
        return packed(units, documents)
    if given["form"] == "padding-free":
        return packed([[i for unit in units for i in unit]], documents)
    (document,) = (documents[i] for unit in units for i in unit)
    return {"input_ids": document[None], "labels": labels_of(document)[None]}


def trained(labels: Tensor, before: int) -> int:
    """A checksum of the token ids that are trained, in their order, after those of earlier passes."""
    return zlib.crc32(labels[labels != -100].numpy().tobytes(), before)


def weight_of(model: nn.Module) -> float:
    """The sum of all parameters' magnitudes, which tells one start from another."""
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())


def model_of(given: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=torch.float32, attn_implementation=given["attention"]
    )


def printed(measured: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Print what was measured of the given cell or, where a library refuses kernels of a GPU, its own words. Any other
    error is a fault of the benchmark, and ends it."""
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        made = measured(given)
    except Exception as error:
        if not (given["liger"] or given["attention"] == "flex_attention"):
            raise
        traceback.print_exc()
        words = " ".join(str(error).split())[:300]
        made = {"refused": f"{type(error).__name__}: {words}"}
    print(json.dumps(made))


def tokenizer() -> PreTrainedTokenizerFast:
    """TRL's trainers want one, though the documents are token ids already; its padding is id 0."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {str(i): i for i in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1", unk_token="0"
    )


class InOrder:
    """A trainer that takes its data in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *more):
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    """CPU-seconds of every timed step of a Trainer, and the losses of all."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.cpu, self.losses = warmup, [], []

    def on_step_begin(self, args, state, control, **more) -> None:
        self.began = time.process_time()

    def on_step_end(self, args, state, control, **more) -> None:
        if state.global_step > self.warmup:
            self.cpu.append(time.process_time() - self.began)

    def on_log(self, args, state, control, logs=None, **more) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class CellClock(Clock):
    """A clock that also knows the real tokens and the trained ids of every step, and the memory that they add."""

    def __init__(self, warmup: int) -> None:
        super().__init__(warmup)
        self.tokens, self.ids = [], []
        self.memory: Memory | None = None

    def on_step_begin(self, args, state, control, **more) -> None:
        self.memory = self.memory or Memory()
        self.tokens.append(0)
        self.ids.append(0)
        super().on_step_begin(args, state, control, **more)

    def watch(self, trainer: Trainer) -> None:
        """Count what every pass of the trainer holds."""
        inner = trainer.training_step

        def counted(model, inputs, *more):
            ids = inputs["input_ids"]
            self.tokens[-1] += int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else ids.numel()
            self.ids[-1] = trained(inputs["labels"], self.ids[-1])
            return inner(model, inputs, *more)

        trainer.training_step = counted  # pyright: ignore[reportAttributeAccessIssue]

    def measured(self, weight: float) -> dict[str, Any]:
        assert self.memory is not None
        return {
            "cpu_s": self.cpu,
            "tokens": self.tokens[self.warmup :],
            "losses": self.losses,
            "trained": self.ids,
            "weight": weight,
            "added_mib": self.memory.added_mib(),
        }


def arguments(given: dict[str, Any], out: str, units: int) -> dict[str, Any]:
    """Arguments of a Trainer whose steps are the project's; `units` are there in all."""
    total = given["steps"] + given["warmup"]
    a_step = units // given["written"]
    assert a_step % given["pass"] == 0, "every pass has as many"
    os.environ["ACCELERATE_DYNAMO_USE_DYNAMIC"] = "1"  # compiled once, for passes of every length
    return {
        "output_dir": out,
        "max_steps": total,
        "per_device_train_batch_size": given["pass"],
        "gradient_accumulation_steps": a_step // given["pass"],
        "bf16": given["dtype"] == "bf16",
        "fp16": False,
        "use_cpu": True,
        "torch_compile": given["compile"],
        "use_liger_kernel": given["liger"],
        "learning_rate": given["lr"],
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "logging_first_step": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
