"""transformers' loss of a row beside ptf's, said before training; a model that ptf reads otherwise is refused."""

import io
import json
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from ptf.compute.world import World
from ptf.config import loads
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.run import run
from ptf.train import load_comparison
from ptf.train.export import probe
from ptf.train.load_comparison import compare_with_transformers
from ptf.train.trainer import load_model
from tests.model.foreign import foreign
from tests.model.ranks import two_ranks, world_of
from tests.model.test_stored_tensors import BF16, FP32, loaded, with_head
from tests.tiny import arithmetic, checkpoint, sample

ROW = sample(40, 0).tokens.tolist()


def compared(source: Path, model: Any, precision: str = "fp32", row: list[int] = ROW, **spec: Any) -> None:
    compare_with_transformers(model, source, ModelConfig(path="-", **spec), row, World(), precision)


@pytest.mark.parametrize("backend", ["ptf", "hf"])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_losses_are_printed_and_another_reading_is_refused(layers, few, backend, tmp_path, monkeypatch, capsys):
    source = checkpoint(tmp_path / "m", num_hidden_layers=layers)
    model = loaded(source, backend)
    size = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(load_comparison, "WHOLE", size - 1 if few else size)
    compared(source, model, backend=backend)
    said = capsys.readouterr().out
    if few and backend == "hf":
        assert "not compared: it is too large to be loaded twice" in said
        return
    assert "transformers' loss of 32 tokens of a row is" in said
    assert ("its first 2 layers alone" if few and layers == 3 else "the whole model") in said
    before = model.layers[-1].forward
    with torch.no_grad():  # control
        next(p for n, p in model.named_parameters() if n.endswith("norm.weight")).add_(0.5)
    with pytest.raises(UserError, match="check-model"):
        compared(source, model, backend=backend)
    assert model.layers[-1].forward == before


@pytest.mark.parametrize(
    ("reason", "head", "row", "spec"),
    [
        ("even its first 2 layers are too large to be loaded twice", "lm", ROW, {}),
        ("its head is no language model's", "scalar", ROW, {}),
        ("four bits", "lm", ROW, {"quantization": "nf4", "lora": {"rank": 2}}),
        ("components of the user's own", "lm", ROW, {"replace": {"layers.*.mlp": {"use": "a:b"}}}),
        ("the row has one token", "lm", ROW[:1], {}),
        (None, "lm", ROW, {"init": "random"}),
    ],
)
def test_what_is_not_compared_is_said(reason, head, row, spec, tmp_path, monkeypatch, capsys):
    source = checkpoint(tmp_path / "m")
    model = load_model(source, World(), ModelConfig(path="-"), seed=0, precision="fp32", head=head)
    for limit in ("WHOLE", "CUT"):
        monkeypatch.setattr(load_comparison, limit, 1)
    compared(source, model, row=row, **spec)
    said = capsys.readouterr().out
    assert reason in said if reason else not said


def test_an_error_without_a_message_is_said(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise AssertionError

    source = checkpoint(tmp_path / "m")
    monkeypatch.setattr(load_comparison, "reference", fails)
    compared(source, loaded(source, "ptf"))
    assert "transformers cannot compute it: AssertionError" in capsys.readouterr().out


@pytest.mark.parametrize(("in_bf16", "refused"), [(1.45, True), (1.2, False)])
def test_what_bf16_does_to_transformers_is_permitted(in_bf16, refused, tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "m")
    model = loaded(source, "ptf")
    ours = -float(np.mean(probe(model, World(), ROW[:32])["logprobs"]))
    theirs = {FP32: 1.5 * ours, BF16: in_bf16 * ours}
    monkeypatch.setattr(load_comparison, "_their_loss", lambda _, __, dtype=FP32: theirs[dtype])
    with pytest.raises(UserError, match="check-model") if refused else nullcontext():
        compared(source, model, "bf16")


def _of_two_ranks() -> tuple[str, bool]:
    source, spec = checkpoint(Path.cwd() / f"{dist.get_rank()}-model", num_hidden_layers=3), ModelConfig(path="-")
    world, said = world_of(MeshSizes(shard=2)), io.StringIO()
    whole, sharded = (load_model(source, w, spec, seed=0, precision="fp32") for w in (World(), world))
    with redirect_stdout(said):
        compare_with_transformers(whole, source, spec, ROW, world, "fp32")  # train.deterministic
        load_comparison.WHOLE = 1
        compare_with_transformers(sharded, source, spec, ROW, world, "fp32")
    logprobs = [probe(m, world, ROW)["logprobs"] for m in (whole, sharded)]
    return said.getvalue(), np.allclose(*logprobs, atol=1e-5)


def test_one_rank_compares_and_sharded_layers_come_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first, same), (second, _) = two_ranks(_of_two_ranks, tmp_path)
    assert same
    assert [line.partition("(")[2] for line in first.splitlines()] == [
        "the whole model)",
        "its first 2 layers alone, because it is too large to be loaded twice)",
    ]
    assert not second


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
    assert ("not tied, as in transformers 5, though its config.json does not say so" in said) is (backend == "ptf")
    exported = json.loads((directory / "model" / "config.json").read_text())
    assert exported["tie_word_embeddings"] is (backend == "hf")
    run(loads(yaml.safe_dump({**raw, "train": {**raw["train"], "steps": 2}})), "a")
    assert "transformers' loss" not in capsys.readouterr().out  # resumed: the weights are others
