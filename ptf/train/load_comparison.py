"""transformers' loss of a row of the job's data beside ptf's, before anything is trained: a tensor or a setting that
ptf reads otherwise shows there."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.nn.functional import cross_entropy

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError, first_line
from ptf.model import model_files
from ptf.model.model import Model
from ptf.model.reference import quiet, reference
from ptf.model.rounding import bound_of
from ptf.train.export import probe
from ptf.train.trainer import forget_forwards

TOKENS, LAYERS = 32, 2
# parameters of transformers' model at most, in fp32: of a whole one, which two cores load and compute in about 5 s, and
# of the first layers of a larger one, whose tables alone may have more
WHOLE, CUT = 1e9, 2.5e9
TOLERANCE = {"fp32": 2e-4, "bf16": 5e-2}  # of the loss, or of 1 nat


def compare_with_transformers(
    model: Model, directory: Path, spec: ModelConfig, row: Sequence[int], world: World, precision: str
) -> None:
    """Print transformers' loss of the first tokens of a row and ptf's; of a large model, those of its first layers,
    under its last norm and head. A model that is not compared is named with the reason, but for random weights.

    Every rank calls it with the same row. Raise UserError if the two losses are not the same.
    """
    if spec.init == "random":
        return
    tokens = np.asarray(row[:TOKENS], np.int32)
    layers = world.together(lambda: _compared_layers(model, spec, tokens))
    same, said = True, f"transformers' loss was not compared: {layers}"
    if isinstance(layers, int):
        with torch.random.fork_rng(devices=[]), _first(layers, model):
            ours = -float(torch.tensor(probe(model, world, tokens)["logprobs"]).mean())
            forget_forwards(model)
            same, said = world.together(lambda: _compared(model, directory, layers, tokens, ours, precision))
    if not same:
        raise UserError(f"model.path: {directory}: {said}; `ptf check-model {directory}` shows where they part")
    if world.leads:
        print(f"model: {said}", flush=True)


def _compared_layers(model: Model, spec: ModelConfig, tokens: np.ndarray) -> int | str:
    """Return how many layers are compared, or why none are."""
    reasons = {
        "its head is no language model's": model.config.head != "lm",
        "its weights are held in four bits (model.quantization)": spec.quantization is not None,
        "it has components of the user's own (model.replace)": bool(spec.replace),
        "the row has one token": len(tokens) < 2,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        return found[0]
    alone, depth = model.first_layers_stand_alone, len(model.config.layers)
    for count, most in ((depth, WHOLE), *([(min(LAYERS, depth), CUT)] if alone else [])):
        left_out = sum(p.numel() for layer in model.layers[count:] for p in layer.parameters())
        if sum(p.numel() for p in model.parameters()) - left_out <= min(most, psutil.virtual_memory().available / 8):
            return count
    return f"{f'even its first {LAYERS} layers are' if alone else 'it is'} too large to be loaded twice"


def _compared(
    model: Model, directory: Path, layers: int, tokens: np.ndarray, ours: float, precision: str
) -> tuple[bool, str]:
    """Return whether the losses are the same, as far as they were compared, and what is said."""
    cut = layers < len(model.config.layers)
    of = f"its first {layers} layers alone, because it is too large to be loaded twice" if cut else "the whole model"
    with _cut(directory, layers) if cut else contextlib.nullcontext(directory) as place:
        try:
            theirs = _their_loss(place, tokens)
            bound, error = TOLERANCE[precision] * max(1.0, theirs), abs(ours - theirs)
            if precision == "bf16":
                bound = bound_of(error, bound, lambda: abs(_their_loss(place, tokens, torch.bfloat16) - theirs))
        except Exception as raised:  # of a dozen kinds, and each means that there is nothing to compare with
            return True, f"transformers' loss was not compared: transformers cannot compute it: {first_line(raised)}"
    line = f"transformers' loss of {len(tokens)} tokens of a row is {theirs:.4f}, ptf's {ours:.4f} ({of})"
    return error <= bound, line


@torch.no_grad()
def _their_loss(directory: Path, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> float:
    quiet()
    ids = torch.from_numpy(tokens).long()
    return float(cross_entropy(reference(directory, dtype)(input_ids=ids[None]).logits[0, :-1].float(), ids[1:]))


@contextlib.contextmanager
def _first(layers: int, model: Model) -> Iterator[None]:
    """Have the other layers return what they are given. They stay in the model, which FSDP prepares at its first
    forward."""
    forwards = [(layer, layer.forward) for layer in model.layers[layers:]]
    for layer, _ in forwards:
        layer.forward = lambda x, *_: x
    try:
        yield
    finally:
        for layer, forward in forwards:
            layer.forward = forward


@contextlib.contextmanager
def _cut(directory: Path, layers: int) -> Iterator[Path]:
    """Yield a directory of the first layers of a model."""
    with tempfile.TemporaryDirectory() as place:
        for file in directory.glob("*.safetensors*"):
            (Path(place) / file.name).symlink_to(file.resolve())
        config = model_files.read_config(directory)
        text = config.get("text_config", config)
        text |= {k: v[:layers] for k, v in text.items() if isinstance(v, list) and len(v) == text["num_hidden_layers"]}
        text |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
        (Path(place) / "config.json").write_text(json.dumps(config))
        yield Path(place)
