"""Our Qwen3 against transformers': logits, gradients, packing, and the way through a checkpoint and back."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ptf.errors import UserError
from ptf.model import bridge, families, model_files, model_writer
from ptf.model.decoder import Decoder
from tests.tiny import checkpoint


def ours(directory: Path) -> Decoder:
    return bridge.load(directory)


def test_a_checkpoint_survives_the_way_through_ours_byte_for_byte(tmp_path):
    for tied in (True, False):
        directory = checkpoint(tmp_path / f"in{tied}", tied=tied)
        model = ours(directory)
        model_writer.save_hf(model.hf_tensors(), directory, tmp_path / f"out{tied}", writes=True)
        before, after = (
            load_file(directory / "model.safetensors"),
            load_file(tmp_path / f"out{tied}" / "model.safetensors"),
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_large_models_are_written_in_shards_that_load(tmp_path, monkeypatch):
    monkeypatch.setattr(model_writer, "SHARD_BYTES", 50_000)
    directory = checkpoint(tmp_path / "in")
    model = ours(directory)
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again = ours(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_random_weights_depend_on_seed_and_name_only(tmp_path):
    directory = checkpoint(tmp_path / "m")

    def drawn(seed):
        model = bridge.build(directory)
        model.give_weights(Path(), torch.device("cpu"), random=True, seed=seed)
        return dict(model.named_parameters())

    a, b, c = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
    assert not torch.equal(a["layers.0.attn.q_proj.weight"], a["layers.1.attn.q_proj.weight"])


def test_what_is_wrong_with_a_model_directory_is_said(tmp_path):
    directory = checkpoint(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        model_files.locate(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"no directory .*absent$"):
        model_files.locate(str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"qwen2_mo.*nearest: qwen2_moe"):
        families.family_of({"model_type": "qwen2_mo"})
    config = model_files.read_config(directory)
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match="num_hidden_layers 3 and 2 layer_types"):
        ours(directory)
    (directory / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention", "other"]}))
    with pytest.raises(UserError, match=r"layer_types: \['other'\]"):
        ours(directory)
    larger = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "intermediate_size": 95}
    (directory / "config.json").write_text(json.dumps({**config, **larger}))
    with pytest.raises(UserError) as error:
        ours(directory)
    assert "missing: model.layers.2.self_attn.q_proj.weight" in str(error.value)
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is (96, 64), the config says (95, 64)" in str(error.value)
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(UserError, match="cannot be read"):
        ours(directory)


def test_a_qwen2_moe_without_the_setting_has_no_windows():
    config = {**families.family_of({"model_type": "qwen2_moe"}).random_config(random.Random(0)), "sliding_window": 8}
    for given in ({}, {"use_sliding_window": False}):
        plain = {k: v for k, v in config.items() if k not in ("use_sliding_window", "layer_types")} | given
        assert {layer.window for layer in families.family_of(plain).config(plain).layers} == {None}
