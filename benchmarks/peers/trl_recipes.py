"""TRL's steps of DPO, reward models and distillation, timed: the peer of benchmarks/recipe_step.py, run by the Python
of an environment of its own (requirements-peers.txt).

Reads one JSON object from the command line: recipe, model directory, that of a frozen model, documents (.npz), units a
pass and a step, steps, warm-up, dtype, learning rate, beta; prints one JSON line. Documents are token ids already and
are taken in their order.
"""

import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sft_cell import Clock, InOrder, arguments, tokenizer, weight_of
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, logging
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer


class ClockOfNorms(Clock):
    """A clock that also keeps the norm of every step's gradient."""

    def __init__(self, warmup: int) -> None:
        super().__init__(warmup)
        self.norms: list[float] = []

    def on_log(self, args, state, control, logs=None, **more) -> None:
        super().on_log(args, state, control, logs, **more)
        if logs and "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


class Given(InOrder):
    """A trainer whose data need no preparing and are taken in their order."""

    def _prepare_dataset(self, dataset, *more, **named):
        return dataset


class GivenDPO(Given, DPOTrainer): ...


class GivenRM(Given, RewardTrainer): ...


class GivenKD(Given, GKDTrainer): ...


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Documents of a prompt and a response each, filled up on the right; the response is trained."""
    ids = [torch.tensor(row["prompt_ids"] + row["response_ids"]) for row in rows]
    labels = [one.clone() for one in ids]
    for row, one in zip(rows, labels, strict=True):
        one[: len(row["prompt_ids"])] = -100
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=0),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def trainer_of(given: dict[str, Any], out: str, clock: Clock) -> Any:
    stored = np.load(given["documents"])
    cuts = [part.tolist() for part in np.split(stored["tokens"], np.cumsum(stored["lengths"].reshape(-1))[:-1])]
    shared = arguments(given, out, given["units"] * given["written"]) | {"remove_unused_columns": False}
    more = {"processing_class": tokenizer(), "callbacks": [clock]}

    def model(directory: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")

    if given["recipe"] == "dpo":
        data = Dataset.from_dict({"prompt_ids": cuts[::3], "chosen_ids": cuts[1::3], "rejected_ids": cuts[2::3]})
        config = DPOConfig(**shared, beta=given["beta"], max_length=given["width"])
        return GivenDPO(
            model=model(given["model"]), ref_model=model(given["frozen"]), args=config, train_dataset=data, **more
        )
    if given["recipe"] == "rm":
        whole = [[a + b for a, b in zip(cuts[::3], cuts[i::3], strict=True)] for i in (1, 2)]
        data = Dataset.from_dict({"chosen_ids": whole[0], "rejected_ids": whole[1]})
        scored = AutoModelForSequenceClassification.from_pretrained(
            given["model"], num_labels=1, dtype=torch.float32, attn_implementation="sdpa"
        )
        return GivenRM(model=scored, args=RewardConfig(**shared, max_length=given["width"]), train_dataset=data, **more)
    data = Dataset.from_dict({"prompt_ids": cuts[::2], "response_ids": cuts[1::2]})
    config = GKDConfig(**shared, lmbda=0.0, beta=0.0, max_length=given["width"])
    return GivenKD(
        model=model(given["model"]),
        teacher_model=model(given["frozen"]),
        args=config,
        train_dataset=data,
        data_collator=collated,
        **more,
    )


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    clock = ClockOfNorms(given["warmup"])
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(given, out, clock)
        weight = weight_of(trainer.model)
        real: list[int] = []
        inner = trainer.training_step

        def counted(model, inputs, *more):
            real.append(int(inputs["attention_mask"].sum()))
            return inner(model, inputs, *more)

        trainer.training_step = counted
        trainer.train()
    passes = given["units"] // given["pass"]
    tokens = [sum(real[i : i + passes]) for i in range(0, len(real), passes)]
    found = {"cpu_s": clock.cpu, "tokens": tokens[given["warmup"] :], "losses": clock.losses}
    print(json.dumps({**found, "norms": clock.norms, "weight": weight}))


if __name__ == "__main__":
    main()
