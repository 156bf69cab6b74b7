"""What a checkpoint directory may hold, and what is said of one that is broken.
MXFP4 as transformers dequantises it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ptf.errors import UserError
from ptf.model import bridge, model_files, model_writer
from ptf.model.tensor_files import TensorFiles
from tests.model.published import mxfp4_checkpoint
from tests.tiny import checkpoint, configured


def refused(directory: Path) -> list[str]:
    with pytest.raises(UserError) as error:
        bridge.load(directory)
    return str(error.value).splitlines()


@pytest.fixture
def directory(tmp_path) -> Path:
    return checkpoint(tmp_path / "m")


def test_every_tensor_that_does_not_fit_is_named_at_once(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    bridge.load(directory)  # control
    layer = "model.layers.0.self_attn"
    del tensors[f"{layer}.q_proj.weight"], tensors["model.norm.weight"]
    tensors[f"{layer}.k_proj.weight"] = tensors[f"{layer}.k_proj.weight"][:-1].clone()
    tensors |= {f"{layer}.q_proj.bias": torch.zeros(128), "model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}
    save_file(tensors, file, {"format": "pt"})
    first, *rest = refused(directory)
    assert "does not fit its config.json" in first
    assert [line.strip() for line in rest] == [
        f"missing: {layer}.q_proj.weight",
        "missing: model.norm.weight",
        f"unexpected: {layer}.q_proj.bias",
        "unexpected: model.layers.2.mlp.up_proj.weight",
        f"wrong shape: {layer}.k_proj.weight is (63, 64), the config says (64, 64)",
    ]


@pytest.mark.parametrize("left", [0, 5, 5000])
def test_a_truncated_file_is_named(directory, left):
    file = directory / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(left)
    (line,) = refused(directory)
    assert f"{file} cannot be read" in line


def test_an_index_that_names_absent_files_or_tensors(directory):
    file, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    names = list(load_file(file))
    part = "model-00001-of-00002.safetensors"
    shutil.copy(file, directory / part)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, part)}))
    bridge.load(directory)  # control
    index.write_text(
        json.dumps({"weight_map": {**dict.fromkeys(names, part), names[0]: "model-00002-of-00002.safetensors"}})
    )
    (line,) = refused(directory)
    assert "names files that do not exist: model-00002-of-00002.safetensors" in line
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "model.absent"], part)}))
    assert "model.absent" in "".join(refused(directory))
    for text in ("{", "[]", "{}"):
        index.write_text(text)
        (line,) = refused(directory)
        assert "model.safetensors.index.json is not an index of tensors" in line


def test_no_weights_or_only_ones_in_another_format(directory):
    (directory / "model.safetensors").unlink()
    (line,) = refused(directory)
    assert "no model.safetensors" in line
    (directory / "pytorch_model.bin").write_bytes(b"")
    (line,) = refused(directory)
    assert "pytorch_model.bin" in line
    assert "safetensors" in line


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_none(directory, text):
    (directory / "config.json").write_text(text)
    (line,) = refused(directory)
    assert "config.json is not a JSON object" in line


def test_a_config_without_a_setting_that_has_no_default(directory):
    config = model_files.read_config(directory)
    del config["hidden_size"]
    (directory / "config.json").write_text(json.dumps(config))
    (line,) = refused(directory)
    assert "config.json has no hidden_size" in line


def test_an_architecture_that_is_not_there_is_named_with_the_nearest_and_the_way_out(directory):
    configured(directory, model_type="qwen3_nexx")
    (line,) = refused(directory)
    assert all(part in line for part in ("'qwen3_nexx'", "nearest: qwen3", "model.backend: hf", "docs/add_a_model.md"))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_a_quantised_checkpoint_is_refused(directory, method):
    configured(directory, quantization_config={"quant_method": method})
    (line,) = refused(directory)
    assert f"quantised ({method})" in line
    assert ("a copy in bf16" in line) == (method == "fp8")


# MXFP4


@pytest.fixture
def quantised(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A gpt_oss checkpoint as it is published, and its tensors in bf16 as transformers dequantises them."""
    return tmp_path / "oss", mxfp4_checkpoint(tmp_path / "oss")


def test_mxfp4_is_dequantised_as_transformers_does(quantised):
    directory, whole = quantised
    with TensorFiles(directory) as files:
        assert files.names == whole.keys()
        for name, tensor in whole.items():
            assert files.shape(name) == tuple(tensor.shape)
            assert torch.equal(files.read(name, tuple(slice(0, n) for n in tensor.shape)), tensor), name
        name = "model.layers.1.mlp.experts.gate_up_proj"
        for part in (
            (slice(1, 2), slice(5, 40), slice(3, 9)),
            (slice(0, 3), slice(32, 64), slice(0, 64)),
            (slice(2, 3), slice(63, 64), slice(1, 2)),
        ):
            assert torch.equal(files.read(name, part), whole[name][part])


def test_every_value_of_four_bits_and_the_extreme_exponents(tmp_path):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 5, 16, 16).contiguous()
    scales = torch.tensor([1, 100, 127, 140, 254], dtype=torch.uint8).view(1, 5, 1).expand(1, 5, 16).contiguous()
    save_file({"a_blocks": blocks, "a_scales": scales}, tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(blocks, scales)
    with TensorFiles(tmp_path) as files:
        assert torch.equal(files.read("a", tuple(slice(0, n) for n in expected.shape)), expected)
    assert len(expected.unique()) > 50


def test_an_mxfp4_checkpoint_is_exported_in_bf16(quantised, tmp_path):
    directory, whole = quantised
    model = bridge.load(directory)
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == whole.keys()
    for name, tensor in whole.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], tensor), name
    config = model_files.read_config(tmp_path / "out")
    assert "quantization_config" not in config
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
