"""What training starts from: the model's directory, its tokenizer, and random weights written out where something must load them."""

import os
from pathlib import Path

from ptf.compute.world import World
from ptf.config.schema import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.model import bridge
from ptf.train.trainer import load_model


def tokenizer_directory(model: ModelConfig, directory: Path, run: Path) -> str:
    """Where the tokenizer's files lie: beside the model, or where `model.tokenizer` says (of a Hugging Face id: a copy in the run)."""
    wanted = model.tokenizer
    if wanted is None or Path(wanted).is_dir():
        return wanted or str(directory)
    copy = run / "tokenizer"
    if not copy.is_dir():
        part = copy.with_name(copy.name + ".tmp")
        Tokenizer.load(wanted).save(part)
        os.replace(part, copy)
    return str(copy)


def start_directory(model: ModelConfig, directory: Path, run: Path, tokenizer: str, seed: int) -> Path:
    """The starting model with weights: random ones are drawn once and written to `run/start`."""
    start = run / "start"
    if model.init == "pretrained":
        return directory
    if not start.is_dir():
        drawn, family = load_model(directory, World(), init="random", seed=seed, precision="fp32")
        bridge.save_hf(bridge.hf_tensors(drawn, family), directory, start, writes=True, tokenizer=tokenizer)
    return start
