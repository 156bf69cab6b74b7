"""transformers' loss of a row beside ptf's, said before training; a model that ptf reads otherwise is refused."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ptf.compute.world import World
from ptf.config import loads
from ptf.config.sections.model import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import bridge
from ptf.run import run
from ptf.train import load_comparison
from ptf.train.load_comparison import compare_with_transformers
from ptf.train.trainer import load_model
from tests.model.foreign import foreign
from tests.model.test_stored_tensors import with_head
from tests.tiny import arithmetic, checkpoint, sample

ROW = sample(40, 0).tokens.tolist()


@pytest.mark.parametrize("backend", ["ptf", "hf"])
@pytest.mark.parametrize("few", [False, True])
def test_the_losses_are_printed_and_another_reading_is_refused(few, backend, tmp_path, monkeypatch, capsys):
    source, spec = checkpoint(tmp_path / "m", num_hidden_layers=3), ModelConfig(path="-", backend=backend)
    model, _ = load_model(source, World(), spec, seed=0, precision="fp32")
    size = sum(t.numel() for t in load_file(source / "model.safetensors").values())
    monkeypatch.setattr(load_comparison, "PARAMETERS", size - 1 if few else size)
    compare_with_transformers(model, source, spec, ROW, World(), "fp32")
    said = capsys.readouterr().out
    if few and backend == "hf":
        assert "not compared: the model is too large to be loaded twice" in said
        return
    assert "transformers' loss of 32 tokens of a row is" in said
    assert ("its first 2 layers alone" if few else "the whole model") in said
    with torch.no_grad():  # control
        next(p for n, p in model.named_parameters() if n.endswith("norm.weight")).add_(0.5)
    if few:  # the layers are loaded anew
        monkeypatch.setattr(bridge, "_decoder_config", otherwise(bridge._decoder_config))
    with pytest.raises(UserError, match="check-model"):
        compare_with_transformers(model, source, spec, ROW, World(), "fp32")


def otherwise(config):
    return lambda *args: replace(config(*args), norm_eps=0.5)


@pytest.mark.parametrize("reason", ["random", "size"])
def test_what_is_not_compared(reason, tmp_path, monkeypatch, capsys):
    source = checkpoint(tmp_path / "m")
    model, _ = load_model(source, World(), ModelConfig(path="-"), seed=0, precision="fp32")
    monkeypatch.setattr(load_comparison, "PARAMETERS", 1)
    spec = ModelConfig(path="-", init="random" if reason == "random" else "pretrained")
    compare_with_transformers(model, source, spec, ROW, World(), "fp32")
    assert ("even its first 2 layers" in capsys.readouterr().out) is (reason == "size")


@pytest.mark.parametrize("backend", ["ptf", "hf"])
def test_a_job_compares_its_first_row(backend, tmp_path, capsys):
    raw = arithmetic(tmp_path)
    raw["model"] = {"path": str(tmp_path / "model"), "backend": backend}
    made, vocab = tmp_path / "made", Tokenizer.load(str(tmp_path / "model")).vocab_size
    checkpoint(made, vocab_size=vocab) if backend == "ptf" else foreign(made, "olmo2", vocab)
    with_head(made, 1.0 if backend == "ptf" else 0.0)
    for file in ("model.safetensors", "config.json"):
        (made / file).replace(tmp_path / "model" / file)
    directory = run(loads(yaml.safe_dump({**raw, "train": {**raw["train"], "steps": 2}})), "a")
    said = capsys.readouterr().out
    assert said.count("model: transformers' loss of") == 1
    assert ("stores an output projection unlike its embedding" in said) is (backend == "ptf")
    exported = json.loads((directory / "model" / "config.json").read_text())
    assert exported["tie_word_embeddings"] is (backend == "hf")
    run(loads(yaml.safe_dump({**raw, "train": {**raw["train"], "steps": 2}})), "a")
    assert "transformers' loss" not in capsys.readouterr().out  # resumed: the weights are others
