"""Our Qwen3 against transformers': logits, gradients, packing, and the way through a checkpoint and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from tests.tiny import checkpoint, packed


def ours(directory: Path) -> Decoder:
    model, family = bridge.build(directory)
    bridge.materialize(model, torch.device("cpu"))
    bridge.load_hf(model, directory, family)
    return model


def logits_of(model: Decoder, batch) -> torch.Tensor:
    return model(batch.tokens, batch.positions, batch.segments, lambda x, head: x @ head.t())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_transformers(tmp_path, tied):
    directory = checkpoint(tmp_path / "m", tied=tied)
    model, reference = ours(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = packed([[40], [40]], 40)
    mine, theirs = logits_of(model, batch), reference(batch.tokens).logits
    assert relative(mine, theirs) <= 1e-5
    weight = torch.randn(mine.shape, generator=torch.Generator().manual_seed(0))
    (mine * weight).sum().backward()
    (theirs * weight).sum().backward()
    names = bridge.family_of(bridge.read_config(directory)).names(model.config)
    grads = {n: p.grad for n, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, grads[names[name]]) <= 1e-5, name


@pytest.mark.parametrize("broken", ["q_norm", "rope", "order"])
def test_a_wrong_definition_is_noticed(tmp_path, broken):
    """Negative control of the comparison above."""
    directory = checkpoint(tmp_path / "m")
    model, reference = ours(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if broken == "q_norm":
        model.layers[0].attn.q_norm = torch.nn.Identity()
    elif broken == "rope":
        object.__setattr__(model.config, "rope_theta", 10_500.0)
    else:
        model.layers = model.layers[::-1]
        for i, layer in enumerate(model.layers):
            layer.attn.layer = i
    batch = packed([[40]], 40)
    assert relative(logits_of(model, batch), reference(batch.tokens).logits) > 1e-3


def test_packed_documents_equal_documents_alone_and_do_not_touch_each_other(tmp_path):
    model = ours(checkpoint(tmp_path / "m"))
    rows = [[5, 17, 1, 30], [2, 2, 44]]
    batch = packed(rows, 60)
    together = logits_of(model, batch)
    at = 0
    for r, row in enumerate(rows):
        at = 0
        for n in row:
            alone = batch.tokens[r : r + 1, at : at + n]
            positions = torch.arange(n)[None]
            apart = model(alone, positions, torch.zeros_like(positions), lambda x, head: x @ head.t())
            assert relative(together[r, at : at + n], apart[0]) <= 1e-5
            at += n
    changed = batch.tokens.clone()
    changed[0, 5:22] = (changed[0, 5:22] + 1) % 97  # the second document of the first row
    other = model(changed, batch.positions, batch.segments, lambda x, head: x @ head.t())
    untouched = torch.ones(2, 60, dtype=torch.bool)
    untouched[0, 5:22] = False
    untouched &= batch.segments >= 0
    assert torch.equal(together[untouched], other[untouched])
    assert not torch.equal(together[0, 5:22], other[0, 5:22])


def test_a_checkpoint_survives_the_way_through_ours_byte_for_byte(tmp_path):
    for tied in (True, False):
        directory = checkpoint(tmp_path / f"in{tied}", tied=tied)
        model = ours(directory)
        family = bridge.family_of(bridge.read_config(directory))
        bridge.save_hf(bridge.hf_tensors(model, family), directory, tmp_path / f"out{tied}", writes=True)
        before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / f"out{tied}" / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_large_models_are_written_in_shards_that_load(tmp_path, monkeypatch):
    monkeypatch.setattr(bridge, "SHARD_BYTES", 50_000)
    directory = checkpoint(tmp_path / "in")
    model = ours(directory)
    bridge.save_hf(bridge.hf_tensors(model, bridge.family_of(bridge.read_config(directory))), directory, tmp_path / "out", writes=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again = ours(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_random_weights_depend_on_seed_and_name_only(tmp_path):
    directory = checkpoint(tmp_path / "m")

    def drawn(seed):
        model, _ = bridge.build(directory)
        bridge.materialize(model, torch.device("cpu"))
        bridge.random_init(model, seed)
        return dict(model.named_parameters())

    a, b, c = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])
    assert not torch.equal(a["layers.0.attn.q_proj.weight"], a["layers.1.attn.q_proj.weight"])


def test_what_is_wrong_with_a_model_directory_is_said(tmp_path):
    directory = checkpoint(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        bridge.locate(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no directory"):
        bridge.locate(str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"qwen2_5.*ptf has qwen3"):
        bridge.family_of({"model_type": "qwen2_5"})
    config = bridge.read_config(directory)
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "intermediate_size": 95}))
    with pytest.raises(UserError) as error:
        ours(directory)
    assert "missing: model.layers.2.self_attn.q_proj.weight" in str(error.value)
    assert "wrong shape: model.layers.0.mlp.up_proj.weight is (96, 64), the config says (95, 64)" in str(error.value)
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(UserError, match="cannot be read"):
        ours(directory)
