"""transformers' loss of a row of the job's data beside ptf's, before anything is trained: a tensor or a setting that
ptf reads otherwise shows there."""

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.reference import quiet, reference_logprobs
from ptf.model.tensor_files import TensorFiles
from ptf.train.export import logprobs_of
from ptf.train.trainer import forget_forwards

TOKENS, LAYERS = 32, 2
PARAMETERS = 1e9  # of transformers' model at most, in fp32: two cores load it and compute 32 tokens in about 5 s
TOLERANCE = {"fp32": 2e-4, "bf16": 5e-2}  # of the loss, or of 1 nat


def compare_with_transformers(
    model: Decoder, directory: Path, spec: ModelConfig, row: Sequence[int], world: World, precision: str
) -> None:
    """Print transformers' loss of the first tokens of a row and ptf's; of a large model, those of its first layers.

    Nothing is compared where transformers has no such model: random or quantised weights, components of the user's own,
    other heads. Every rank calls it with the same row. Raise UserError if the two losses are not the same.
    """
    tokens = np.asarray(row[:TOKENS], np.int32)
    if len(tokens) < 2 or model.config.head != "lm" or spec.init == "random" or spec.quantization or spec.replace:
        return
    ours = -float(logprobs_of(model, tokens, world).mean())
    forget_forwards(model)
    with torch.random.fork_rng(devices=[]):
        found = world.broadcast_object(_compared(directory, spec, tokens, ours, precision) if world.leads else None)
    line, same = cast("tuple[str, bool]", found)
    if not same:
        raise UserError(f"model.path: {directory}: {line}; `ptf check-model {directory}` shows where they part")
    if world.leads:
        print(f"model: {line}", flush=True)


def _compared(directory: Path, spec: ModelConfig, tokens: np.ndarray, ours: float, precision: str) -> tuple[str, bool]:
    """Return what is said, and whether the losses are the same, as far as they were compared."""
    with TensorFiles(directory) as files:
        size = sum(math.prod(files.shape(name)) for name in files.names)
    of = "the whole model"
    try:
        if _affordable(size):
            theirs = _their_loss(directory, tokens)
        elif spec.backend == "hf":
            raise UserError("the model is too large to be loaded twice")
        else:
            of, precision = f"its first {LAYERS} layers alone, because it is too large to be loaded twice", "fp32"
            ours, theirs = _losses_of_first_layers(directory, tokens)
    except UserError as error:
        return f"transformers' loss was not compared: {error}", True
    line = f"transformers' loss of {len(tokens)} tokens of a row is {theirs:.4f}, ptf's {ours:.4f} ({of})"
    return line, abs(ours - theirs) <= TOLERANCE[precision] * max(1.0, theirs)


def _affordable(parameters: int) -> bool:
    return parameters <= min(PARAMETERS, psutil.virtual_memory().available / 8)


def _their_loss(directory: Path, tokens: np.ndarray) -> float:
    quiet()
    try:
        return -float(reference_logprobs(directory, tokens.tolist()).mean())
    except Exception as error:  # transformers raises a dozen kinds; each means that there is nothing to compare with
        raise UserError(f"transformers cannot compute it: {str(error).strip().splitlines()[0]}") from error


def _losses_of_first_layers(directory: Path, tokens: np.ndarray) -> tuple[float, float]:
    """Return the losses of ptf and of transformers with the first layers of a model, under its last norm and head."""
    with tempfile.TemporaryDirectory() as place:
        for file in directory.glob("*.safetensors*"):
            (Path(place) / file.name).symlink_to(file.resolve())
        config = bridge.read_config(directory)
        text = config.get("text_config", config)
        text |= {k: v[:LAYERS] for k, v in text.items() if isinstance(v, list) and len(v) == text["num_hidden_layers"]}
        text |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 0}
        (Path(place) / "config.json").write_text(json.dumps(config))
        model, family = bridge.build(Path(place), head="lm")
        if not _affordable(sum(p.numel() for p in model.parameters())):
            raise UserError(f"even its first {LAYERS} layers are too large to be loaded twice")
        bridge.materialize(model, torch.device("cpu"))
        with TensorFiles(directory, family.aliases) as files:
            bridge.load_hf_tensors(model, cast("Any", files), family)
        return -float(logprobs_of(model.eval(), tokens, World()).mean()), _their_loss(Path(place), tokens)
