"""TRL's packed SFT step, timed: the peer of benchmarks/train_step.py, run by the Python of an environment of its own (requirements-peers.txt).

Reads one JSON object from the command line: model config, documents (.npz), row width, rows, steps, warm-up, dtype, seed; prints one JSON line.
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback, logging
from trl import SFTConfig, SFTTrainer


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """The trainer wants one, though the documents are token ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {str(i): i for i in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1", unk_token="0")


class Clock(TrainerCallback):
    def __init__(self, warmup: int) -> None:
        self.warmup, self.cpu, self.wall, self.base, self.peak = warmup, [], [], 0.0, 0.0

    def on_step_begin(self, args, state, control, **more) -> None:
        if not self.base:
            self.base = resident_mib()
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
        self.began = (time.process_time(), time.perf_counter())

    def on_step_end(self, args, state, control, **more) -> None:
        if state.global_step > self.warmup:
            self.cpu.append(time.process_time() - self.began[0])
            self.wall.append(time.perf_counter() - self.began[1])
        status = Path("/proc/self/status").read_text()
        self.peak = int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(given["seed"])
    stored = np.load(given["documents"])
    starts = np.cumsum(stored["lengths"]) - stored["lengths"]
    documents = [stored["tokens"][s : s + n] for s, n in zip(starts, stored["lengths"], strict=True)]
    masks = [(np.arange(len(d)) >= 0.4 * len(d)).astype(int) for d in documents]
    data = Dataset.from_dict({"input_ids": [d.tolist() for d in documents], "completion_mask": [m.tolist() for m in masks]})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given["config"]), dtype=torch.float32, attn_implementation="sdpa")
    clock = Clock(given["warmup"])
    with tempfile.TemporaryDirectory() as out:
        args = SFTConfig(
            output_dir=out, max_steps=given["steps"] + given["warmup"], per_device_train_batch_size=given["rows"], max_length=given["width"],
            packing=True, packing_strategy="bfd", completion_only_loss=True, bf16=given["dtype"] == "bf16", fp16=False, use_cpu=True,
            learning_rate=1e-4, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": False}, seed=given["seed"], lr_scheduler_type="constant", optim="adamw_torch_fused",
        )  # fmt: skip
        trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(min(64, given["config"]["vocab_size"])), callbacks=[clock])
        real: list[int] = []
        inner = trainer.training_step

        def counted(model, inputs, *more):
            real.append(int(inputs["position_ids"].numel() if "attention_mask" not in inputs else inputs["attention_mask"].sum()))
            return inner(model, inputs, *more)

        trainer.training_step = counted
        trainer.train()
    tokens = real[given["warmup"] :]
    print(json.dumps({"cpu_s": clock.cpu, "wall_s": clock.wall, "tokens": tokens, "added_mib": clock.peak - clock.base}))


if __name__ == "__main__":
    main()
