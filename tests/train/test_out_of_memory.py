"""What a run advises when its GPU has no memory left."""

import pytest
import torch

from ptf.config import loads
from ptf.train.loop import out_of_memory

JOB = "recipe: sft\nmodel: {path: m}\ndata: {sources: {a: {path: a}}}\ntrain: {steps: 1, lr: 1e-4}\n"


@pytest.mark.parametrize(("now", "advised"), [("none", "block"), ("selective", "block"), ("block", "offload")])
def test_the_next_mode_of_checkpointing_is_advised(now, advised):
    job = loads(JOB, [f"train.activation_checkpointing={now}", "train.micro_batch_sequences=1"])
    text = str(out_of_memory(job, torch.OutOfMemoryError("CUDA out of memory.\nmore")))
    assert text.startswith("out of memory (CUDA out of memory.)")
    assert f"set train.activation_checkpointing: {advised}" in text
    assert "micro_batch_sequences" not in text
    assert "set train.optimizer: adamw_offload" in text


def test_what_is_set_already_is_not_advised():
    keys = ["train.activation_checkpointing=offload", "train.optimizer=adamw_offload", "train.micro_batch_sequences=4"]
    text = str(out_of_memory(loads(JOB, keys), torch.OutOfMemoryError("full")))
    assert "activation_checkpointing" not in text
    assert "train.optimizer" not in text
    assert "lower train.micro_batch_sequences (now 4" in text
