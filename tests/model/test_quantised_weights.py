"""Weights in four bits: their products are those of the model that holds what they are dequantised to."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model import bridge, mxfp4
from ptf.model.flops import Flops
from ptf.model.nf4 import BLOCK, dequantise, quantise
from ptf.model.quantised_weights import FORMS, quantised_weights, weight_shapes
from ptf.recipes.sft.recipe import SFT
from ptf.train.components import layer_factory_of
from ptf.train.trainable import freeze
from ptf.train.trainer import load_model
from tests import tiny
from tests.model.published import mxfp4_checkpoint
from tests.recipes.of_keys import of_keys

LORA = {"rank": 4, "alpha": 8, "targets": ["*"]}
WIDTHS = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}


def test_codes_and_scales_are_those_of_bitsandbytes_4_bit_models() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(3, 8, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight)
    assert codes.shape == (3, 8, BLOCK)
    assert scales.shape == (3, 8, 8)
    assert codes.nbytes + scales.nbytes == weight.numel() * 4.5 / 8
    theirs = dequantize_4bit(*quantize_4bit(weight.view(24, -1), blocksize=BLOCK, quant_type="nf4"))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantise(codes, scales, dtype), theirs.view_as(weight).to(dtype))
    assert 0 < (theirs.view_as(weight) - weight).abs().mean() < 0.1 * weight.abs().mean()
    again = quantise(dequantise(codes, scales, torch.float32))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def models(directory: Path, form: str = "nf4", **changes: object) -> tuple[nn.Module, nn.Module]:
    """A packed model with adapters, and the same with what its weights are dequantised to."""
    found = []
    for quantization in (form, None):
        spec = ModelConfig(path=str(directory), lora=LORA, quantization=quantization, **changes)
        model = load_model(directory, World(), spec, seed=0, precision="fp32")
        found.append(model)
    packed, plain = found
    parts, values = dict(packed.named_parameters()), dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in quantised_weights(packed).items():
            dequantised = FORMS[weight.form].dequantise(parts[weight.codes], parts[weight.scales], torch.float32)
            assert torch.equal(values[name], dequantised) == (form == "mxfp4"), "MXFP4 rounds nothing, NF4 does"
            values[name].copy_(dequantised)
        for name, parameter in parts.items():
            if name.endswith("lora_b"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
                values[name].copy_(parameter)
    return packed, plain


def published(directory: Path) -> Path:
    """Write a GPT-OSS checkpoint as it is published: experts in MXFP4, biases everywhere, attention sinks."""
    mxfp4_checkpoint(directory)
    return directory


@pytest.mark.parametrize(("family", "form"), [("qwen3", "nf4"), ("moe", "nf4"), ("gpt_oss", "mxfp4")])
def test_loss_and_gradients_are_those_of_the_dequantised_model(family: str, form: str, tmp_path: Path) -> None:
    make = {"qwen3": partial(tiny.checkpoint, **WIDTHS), "moe": experts, "gpt_oss": published}[family]
    packed, plain = models(make(tmp_path / "m"), form)
    assert sorted(weight_shapes(packed)) == sorted(name for name, _ in plain.named_parameters())
    quantised = quantised_weights(packed)
    assert all(name.startswith("layers.") for name in quantised)
    assert not any("router" in name or "norm" in name for name in quantised)
    assert len(quantised) == 2 * (3 if form == "mxfp4" else 7)
    batch = tiny.packed([[20, 12], [30]], 32)
    vocabulary = len(plain.embed.weight)
    batch = replace(batch, tokens=batch.tokens % vocabulary, targets=batch.targets % vocabulary)
    losses = []
    for model in (packed, plain):
        loss, _ = of_keys(SFT).loss(model, batch, {})
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in packed.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        scale = gradients[name].abs().max()
        assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-6 * float(scale), name
    assert Flops.of(packed) == Flops.of(plain)


def experts(directory: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{**tiny.SIZES, **WIDTHS}, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def test_nothing_is_held_between_forward_and_backward_but_bytes(tmp_path: Path) -> None:
    packed, plain = models(tiny.checkpoint(tmp_path / "m", **WIDTHS))
    held = []
    for model in (packed, plain):
        shapes = {tuple(shape) for name, shape in weight_shapes(model).items() if name in quantised_weights(packed)}
        floats: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, floats: list = floats, shapes: set = shapes) -> torch.Tensor:
            if (
                tensor.dim() == 2
                and {tuple(tensor.shape), tuple(tensor.t().shape)} & shapes
                and tensor.is_floating_point()
            ):
                floats.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            of_keys(SFT).loss(model, tiny.packed([[32]], 32), {})
        held.append(len(floats))
    assert held[0] == 0
    assert held[1] > 0, "negative control: products with plain weights save them"


def test_what_trains_is_not_packed_and_what_is_no_whole_block_is_refused(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "m", **WIDTHS)
    spec = ModelConfig(path=str(directory), lora=LORA, quantization="nf4", trainable=["layers.0.attn.q_proj", "embed"])
    model = bridge.build(directory, factory=layer_factory_of(spec, adapted=True))
    freeze(model, spec.trainable)
    weights = quantised_weights(model)
    assert "layers.0.attn.q_proj.weight" not in weights
    assert "layers.1.attn.q_proj.weight" in weights
    assert model.get_parameter("layers.0.attn.q_proj.weight").requires_grad
    odd = tiny.checkpoint(tmp_path / "odd", intermediate_size=96)
    factory = layer_factory_of(ModelConfig(path=str(odd), lora=LORA, quantization="nf4"), adapted=True)
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj\.weight have 96 values, not a multiple of 64"):
        bridge.build(odd, factory=factory)


def test_mxfp4_holds_every_value_that_a_checkpoint_can_store_and_no_other() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 40, 64), generator=draw, dtype=torch.uint8)
    codes[0, 0] = 0  # blocks of zeros
    codes[0, 1] = 0x11  # whose largest value is the least
    for low, high in ((1, 4), (100, 150), (250, 253)):
        scales = torch.randint(low, high, (3, 40, 4), generator=draw, dtype=torch.uint8)
        values = mxfp4.dequantise(codes, scales, torch.float32)
        again = mxfp4.quantise(values)
        assert torch.equal(mxfp4.dequantise(*again, torch.float32), values)
        assert torch.equal(mxfp4.dequantise(*again, torch.bfloat16), values.bfloat16())
        assert again[0].nbytes + again[1].nbytes == values.numel() * 4.25 / 8
    values[1, 2, 3] = values[1, 2].abs().max() / 1.75
    with pytest.raises(UserError, match=r"this one has other values; set model\.quantization: nf4"):
        mxfp4.quantise(values)


def test_mxfp4_is_converted_in_chunks_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 9, 32), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 9, 2), generator=draw, dtype=torch.uint8)
    whole = mxfp4.dequantise(codes, scales, torch.float32)
    monkeypatch.setattr(mxfp4, "CHUNK", 100)
    assert torch.equal(mxfp4.dequantise(codes, scales, torch.float32), whole)
    assert torch.equal(mxfp4.dequantise(*mxfp4.quantise(whole), torch.float32), whole)


def test_a_model_without_experts_has_nothing_for_mxfp4(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "m", **WIDTHS)
    factory = layer_factory_of(ModelConfig(path=str(directory), lora=LORA, quantization="mxfp4"), adapted=True)
    with pytest.raises(UserError, match="mxfp4 holds experts only"):
        bridge.build(directory, factory=factory)


def test_weights_that_a_checkpoint_does_not_store_in_mxfp4_are_refused(tmp_path: Path) -> None:
    spec = ModelConfig(path=str(experts(tmp_path / "m")), lora=LORA, quantization="mxfp4")
    with pytest.raises(UserError, match="keeps weights that a checkpoint stores in MXFP4"):
        load_model(tmp_path / "m", World(), spec, seed=0, precision="fp32")
