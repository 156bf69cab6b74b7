"""TRL's DPO step, timed: the peer of benchmarks/dpo_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads one JSON object from the command line: model directory, pairs (.npz), pairs a pass and a step, steps, warm-up,
dtype, learning rate, beta; prints one JSON line. Pairs are token ids already and are taken in their order.
"""

import json
import sys
import tempfile

import numpy as np
import torch
from datasets import Dataset
from sft_cell import Clock
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, logging
from trl import DPOConfig, DPOTrainer


class Given(DPOTrainer):
    """With data that needs no preparing."""

    def _prepare_dataset(self, dataset, *more, **named):
        return dataset

    def _get_train_sampler(self, *more):
        return SequentialSampler(self.train_dataset)


def tokenizer() -> PreTrainedTokenizerFast:
    """The trainer wants one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {str(i): i for i in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1", unk_token="0"
    )


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    stored = np.load(given["documents"])
    cuts = [part.tolist() for part in np.split(stored["tokens"], np.cumsum(stored["lengths"].reshape(-1))[:-1])]
    data = Dataset.from_dict({"prompt_ids": cuts[::3], "chosen_ids": cuts[1::3], "rejected_ids": cuts[2::3]})
    model, reference = (
        AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32, attn_implementation="sdpa")
        for _ in range(2)
    )
    clock = Clock(given["warmup"])
    with tempfile.TemporaryDirectory() as out:
        args = DPOConfig(
            output_dir=out,
            max_steps=given["steps"] + given["warmup"],
            per_device_train_batch_size=given["pairs"],
            gradient_accumulation_steps=given["accumulated"] // given["pairs"],
            max_length=given["width"],
            bf16=given["dtype"] == "bf16",
            fp16=False,
            use_cpu=True,
            learning_rate=given["lr"],
            beta=given["beta"],
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            logging_first_step=True,
            disable_tqdm=True,
            gradient_checkpointing=False,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=1.0,
            remove_unused_columns=False,
        )
        trainer = Given(
            model=model,
            ref_model=reference,
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=[clock],
        )
        real: list[int] = []
        inner = trainer.training_step

        def counted(model, inputs, *more):
            real.append(int(inputs["attention_mask"].sum()))
            return inner(model, inputs, *more)

        trainer.training_step = counted
        trainer.train()
    passes = given["accumulated"] // given["pairs"]
    tokens = [sum(real[i : i + passes]) for i in range(0, len(real), passes)]
    print(json.dumps({"cpu_s": clock.cpu, "tokens": tokens[given["warmup"] :], "losses": clock.losses}))


if __name__ == "__main__":
    main()
