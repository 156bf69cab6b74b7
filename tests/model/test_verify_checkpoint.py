"""Checkpoints beside transformers: our error against that of transformers, both beside fp64."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.verify import on_checkpoint
from ptf import cli
from ptf.model import decoder, verify
from ptf.model.reference import exact_reference
from ptf.model.rounding import Double
from ptf.model.verify import DRAWS, FACTOR, GRADIENTS, LEAST, LOGITS, Case, Reference, judged
from tests.model.mistakes import CASTS, MISTAKES, layers
from tests.real import model as real_model
from tests.tiny import checkpoint


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Of a model with a window that none of the packed documents reaches."""
    window = {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 0}
    directory = checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096, **window)
    sharpen(directory, 2)
    return Reference(directory)


def sharpen(directory: Path, factor: float) -> None:
    """Multiply what scales queries and keys, so that positions and rounding matter."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {n: t * factor if n.endswith(("q_norm.weight", "k_norm.weight")) else t for n, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def failed(report: Case) -> str:
    return next((finding.what for finding in report.findings if not finding.passed), "")


def test_our_error_is_that_of_transformers(reference):
    report = reference.compare()
    assert report.passed
    named = [finding.what for finding in report.findings]
    assert [n.split(" of ")[0] for n in named] == [
        "fp32, random tokens",
        "fp32, gradient",
        "fp32, long document",
        "fp32, leak between documents",
        "bf16, random tokens",
        "bf16, long document",
        "bf16, positions",
    ]
    assert [f.ours for f in report.findings if "leak" in f.what] == [0.0]
    assert all(f.theirs > 1e-3 for f in report.findings if f.what.startswith("bf16"))  # it is computed in bf16
    assert "no tokenizer.json" in report.notes[0]


def test_a_window_that_only_the_long_document_reaches_is_compared(reference, monkeypatch):
    wrong = layers(lambda i, kind: decoder.replace(kind, window=kind.window and kind.window + 1))
    monkeypatch.setitem(
        __import__("ptf.model.families.qwen", fromlist=["FAMILIES"]).FAMILIES,
        "qwen3",
        wrong(verify.family_of(reference.config)),
    )
    assert failed(reference.compare()) == "fp32, long document"


def test_a_gradient_is_compared_tensor_by_tensor_without_a_floor(reference):
    """A gradient that is lost from one small tensor, whatever the other tensors' are."""

    def change(model) -> None:
        model.layers[0].attn.k_norm.weight.register_hook(lambda g: g * (1 + 1e-4))

    report = reference.compare(change)
    assert failed(report) == "fp32, gradient of model.layers.0.self_attn.k_norm.weight"


def test_a_leak_is_found(reference, monkeypatch):
    right = decoder.inside_documents
    assert reference.compare().passed
    # all documents of a sequence as one; positions stay
    monkeypatch.setattr(decoder, "inside_documents", lambda s, p, v: right(torch.where(s < 0, s, 0), p))
    assert failed(reference.compare()) == "fp32, random tokens"


@pytest.mark.parametrize("mistake", CASTS, ids=lambda mistake: mistake.name)
def test_a_wrong_order_of_casts_is_found_in_bf16(reference, mistake):
    with mistake.made():
        assert failed(reference.compare(mistake.model)).startswith("bf16, ")


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        (1e-5, 1e-5 * FACTOR, "pass"),
        (1e-5, 1e-5 * FACTOR * 1.01, "fail"),
        (1e-9, 1e-6 * FACTOR, "pass"),
        (9e-5, 1e-4, "pass"),
        (9e-5, 1.1e-4, "fail"),
        (1.1e-4, 0.0, "cannot judge"),
        (float("nan"), 0.0, "cannot judge"),
        (1e-5, float("nan"), "fail"),
    ],
)
def test_the_tolerance_is_that_of_transformers_and_has_an_end(theirs, ours, verdict):
    found = judged("", theirs, ours, 1e-4, LEAST)
    assert (found.verdict, found.passed) == (verdict, verdict == "pass")


def test_where_transformers_is_inexact_nothing_is_judged(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify, "LOGITS", 1e-9)  # no fp32 is so exact
    directory = checkpoint(tmp_path / "model")
    assert cli.main(["check-model", str(directory)]) == 1
    out = capsys.readouterr().out
    assert "cannot judge" in out
    assert "draw 1 of" not in out, "other tokens do not make the long document clearer"
    assert out.splitlines()[-1] == f"{directory}: fail"


@pytest.mark.parametrize("inexact", [1, DRAWS])
@pytest.mark.parametrize(("name", "bound"), [("random tokens", LOGITS), ("gradient of model.norm.weight", GRADIENTS)])
def test_random_tokens_are_drawn_again_where_transformers_alone_is_inexact(tmp_path, monkeypatch, inexact, name, bound):
    directory, right, drawn = checkpoint(tmp_path / "model"), Reference._errors, []

    def errors(self, result):
        drawn.append(self.inputs.documents[1])
        return right(self, result) | ({name: bound * 1.5} if len(drawn) <= inexact else {})

    monkeypatch.setattr(Reference, "_errors", errors)
    monkeypatch.setattr(verify.bridge, "build", None)  # ours has no part in it
    reference = Reference(directory)
    monkeypatch.undo()
    assert len({tuple(d.tolist()) for d in drawn}) == len(drawn) == min(inexact + 1, DRAWS)
    notes = [note for note in reference.notes if "draw " in note]
    assert len(notes) == inexact
    assert f"{bound * 1.5:.2e}" in notes[0]
    assert name in notes[0]
    case = reference.compare()
    assert [f.verdict for f in case.findings if not f.passed] == (["cannot judge"] if inexact == DRAWS else [])


def test_the_exact_reference_has_exact_frequencies(tmp_path):
    with Double():
        hf = exact_reference(checkpoint(tmp_path / "model"))
    [found] = [b for n, b in hf.named_buffers() if n.endswith("rotary_emb.inv_freq")]
    dim = 2 * len(found)
    theta = hf.config.rope_parameters["rope_theta"]
    exact = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0)
    assert (exact.float().double() - exact).abs().max() > 1e-10  # negative control


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_real_models_pass_and_every_effective_mistake_on_them_is_caught(name):
    reference = Reference(real_model(name))
    assert reference.compare().passed
    found = on_checkpoint(reference)
    assert "MISSED" not in found.values()
    caught = {mistake for mistake, what in found.items() if what != "without effect"}
    assert {"gate and up swapped", "rope base 1 % off", "norm epsilon ten times too large"} <= caught
    assert {mistake.name for mistake in CASTS} <= caught
    assert ("biases of queries, keys and values left out" in caught) is ("coder" in name)
    assert len(caught) + 5 < len(found) <= len(MISTAKES)
