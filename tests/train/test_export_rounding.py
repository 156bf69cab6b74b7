"""Exports of models whose own rounding in bf16 is beyond the bound of a log-prob: they are published, and one with
another weight is not."""

import json

import pytest
import yaml
from safetensors.torch import load_file, save_file

from ptf.config import loads
from ptf.config.logprob_limits import LOGPROB_TOLERANCE
from ptf.errors import UserError
from ptf.model import rounding
from ptf.publish.export_comparison import adapter_difference, model_difference
from ptf.run import run
from tests.tiny import SIZES, arithmetic, checkpoint


def sharp(directory, **model) -> dict:
    """A job in bf16 of a model whose logits are some fifty times those of a drawn one."""
    raw = arithmetic(directory)
    config = json.loads((directory / "model" / "config.json").read_text())
    checkpoint(
        directory / "model",
        tied=False,
        **{**SIZES, "vocab_size": config["vocab_size"], "eos_token_id": config["eos_token_id"]},
    )
    file = directory / "model" / "model.safetensors"
    held = load_file(file)
    save_file({n: t * 50 if n == "lm_head.weight" else t for n, t in held.items()}, file, {"format": "pt"})
    raw["model"] = {"path": str(directory / "model"), **model}
    raw["train"] |= {"steps": 1, "lr": 1e-5, "precision": "bf16"}
    return raw


def damage(file):
    """One matrix of the first layer a half larger."""
    held = load_file(file)
    save_file({n: t * 1.5 if "layers.0.mlp.down_proj" in n else t for n, t in held.items()}, file, {"format": "pt"})


def test_a_model_beyond_the_bound_by_its_own_rounding_is_published_and_another_one_is_not(tmp_path, monkeypatch):
    job = loads(yaml.safe_dump(sharp(tmp_path)))
    made = run(job, "sharp")
    assert model_difference(job, made, made / "model") > LOGPROB_TOLERANCE["bf16"]
    with monkeypatch.context() as without:
        without.setattr(rounding, "FACTOR", 0.0)
        with pytest.raises(UserError, match=r"differs from the trained model by .* \(bound 0\.2\)"):
            model_difference(job, made, made / "model")
    damage(made / "model" / "model.safetensors")
    with pytest.raises(UserError, match="differs from the trained model"):
        model_difference(job, made, made / "model")


def test_so_are_adapters(tmp_path, monkeypatch):
    job = loads(yaml.safe_dump(sharp(tmp_path, lora={"rank": 4})))
    with monkeypatch.context() as without:  # training loads its own export again, by the same rule
        without.setattr(rounding, "FACTOR", 0.0)
        with pytest.raises(UserError, match=r"loaded again, .*model differs from the trained model"):
            run(job, "without")
    made = run(job, "sharp")
    assert adapter_difference(job, made, made / "adapter") > LOGPROB_TOLERANCE["bf16"]
    damage(tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match="differs from the trained model"):
        adapter_difference(job, made, made / "adapter")
