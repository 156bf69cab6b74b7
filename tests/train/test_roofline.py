"""The bound of MFU by operator: its FLOPs are those that MFU divides by, and its bytes those that a kernel moves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.published_shapes import write_config
from ptf import cli
from ptf.config import loads
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.flops import Flops, pairs
from ptf.model.kernels.elementwise import normalised
from ptf.train.roofline import (
    GPUS,
    Costs,
    Timeline,
    _Kernel,
    head_costs,
    layer_costs,
    raise_if_uncounted,
    roofline,
)
from ptf.train.trainable import freeze

GPU = GPUS["H200"]
LENGTHS = [300, 212, 128, 384]  # two rows of 512


def raw(directory: Path, **train: Any) -> dict[str, Any]:
    return {
        "recipe": "sft",
        "output": "runs",
        "model": {"path": str(directory)},
        "data": {"seq_len": 2048, "sources": {"a": {"path": "a.jsonl", "kind": "text"}}},
        "train": {"steps": 1, "lr": 1e-4, "global_batch_sequences": 4, "micro_batch_sequences": 1, **train},
    }


def job(directory: Path, **train: Any):
    return loads(json.dumps(raw(directory, **train)))


def first_layer(model, frozen):
    """The costs of a model's first layer, compiled and without recomputation."""
    options = {"sequences": 2, "recomputed": "none", "compiled": True, "frozen": frozen}
    return layer_costs(model.config, 0, model.factory, GPU, LENGTHS, **options)


@pytest.mark.parametrize("shape", ["Qwen3-0.6B", "Gemma-3-4B", "gpt-oss-20b", "Qwen3-30B-A3B"])
def test_products_are_those_that_mfu_counts(tmp_path, shape):
    model = bridge.build(write_config(shape, tmp_path, num_hidden_layers=1, layer_types=None))
    costs = first_layer(model, frozen=lambda name: False)
    flops, window = Flops.of(model), model.config.layers[0].window
    # and the sums of routing, and of the gradients of experts' biases, which are products with ones
    assert costs.flops["matrix products"] == pytest.approx(flops.per_token * sum(LENGTHS), rel=1e-3)
    kept = sum(pairs(length, window) for length in LENGTHS)
    assert costs.flops["attention"] == pytest.approx(flops.per_pair[window] * kept / 3, rel=1e-6)


def test_frozen_weights_have_no_products_of_their_own(tmp_path):
    model = bridge.build(write_config("Qwen3-0.6B", tmp_path, num_hidden_layers=1))
    freeze(model, ["layers.*.mlp.down_proj.weight"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"layers.0.mlp.down_proj.weight"}
    costs = first_layer(model, frozen=lambda name: name not in trained)
    # the gradient passes to the layer below: twice its weights, and a third product for the trained one
    weights = sum(p.numel() for n, p in model.layers[0].named_parameters() if n.endswith("proj.weight"))
    down = model.layers[0].mlp.down_proj.weight.numel()  # type: ignore[union-attr]
    assert costs.flops["matrix products"] == 2.0 * sum(LENGTHS) * (2 * weights + down)


def test_a_compiled_function_moves_its_inputs_and_outputs():
    costs = Costs(GPU)
    timeline = Timeline(costs)
    x = torch.empty(1 << 16, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with timeline:
        y = _Kernel.apply(normalised, timeline, x, weight, 1e-6, False)
        y.backward(torch.empty_like(y))
    speed = GPU.bandwidth * 0.85
    assert costs.seconds["compiled normalised"] == pytest.approx((2 * x.nbytes + weight.nbytes) / speed)
    backward = costs.seconds["compiled normalised, backward"]
    assert backward == pytest.approx((3 * x.nbytes + 2 * weight.nbytes) / speed)
    assert set(costs.seconds) == {"compiled normalised", "compiled normalised, backward"}


def test_a_small_kernel_costs_its_launch_and_a_view_nothing():
    costs = Costs(GPU)
    x = torch.empty(8, device="meta")
    with Timeline(costs):
        (x.view(2, 4).t() + 1).sum()
    assert costs.total == pytest.approx(2 * 2e-6)


def test_the_head_makes_three_products_of_every_trained_position():
    costs = head_costs(GPU, 4096, 1024, 151_936, 1 << 30, True)
    products = [flops for name, flops in costs.flops.items() if flops]
    assert products == pytest.approx([2.0 * 4096 * 1024 * 151_936] * 3)
    small = head_costs(GPU, 4096, 1024, 151_936, 64 << 20, True)
    assert small.total > 1.2 * costs.total  # the whole gradient is read and written for each chunk


def test_what_saves_traffic_raises_the_bound_and_what_is_made_again_lowers_it(tmp_path):
    write_config("Qwen3-0.6B", tmp_path, num_hidden_layers=2)

    def mfu(**train: Any) -> float:
        return roofline(job(tmp_path, **train), tmp_path, 1, "H200").mfu

    best = mfu(compile=True)
    assert 0 < mfu(compile=False) < best < 1
    assert (
        mfu(compile=True, activation_checkpointing="block")
        < mfu(compile=True, activation_checkpointing="selective")
        < best
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_head_has_no_gradient_of_its_weight(tmp_path, tied):
    write_config("Qwen3-0.6B", tmp_path, num_hidden_layers=1, tie_word_embeddings=tied)
    whole = roofline(job(tmp_path), tmp_path, 1, "H200").operators
    adapted = raw(tmp_path)
    adapted["model"]["lora"] = {"rank": 8}
    frozen = roofline(loads(json.dumps(adapted)), tmp_path, 1, "H200").operators
    assert "head: gradient of the weight" in whole
    assert "head: gradient of the weight" not in frozen
    assert "embedding, backward" not in frozen


def test_the_parts_add_up_to_the_step(tmp_path):
    write_config("Qwen3-0.6B", tmp_path, num_hidden_layers=2)
    bound = roofline(job(tmp_path), tmp_path, 2, "H200")
    assert sum(bound.operators.values()) + bound.exposed == pytest.approx(bound.seconds)
    assert list(bound.operators.values()) == sorted(bound.operators.values(), reverse=True)


@pytest.mark.parametrize(
    ("gpu", "train", "message"),
    [("RTX", {}, "the GPU RTX: it has H200"), ("H200", {"precision": "fp32"}, "train.precision: fp32")],
)
def test_what_is_not_counted_is_refused_by_name(tmp_path, gpu, train, message):
    write_config("Qwen3-0.6B", tmp_path, num_hidden_layers=2)
    with pytest.raises(UserError, match=message):
        roofline(job(tmp_path, **train), tmp_path, 1, gpu)


def test_the_command_prints_a_table_and_json(tmp_path, capsys):
    write_config("Qwen3-0.6B", tmp_path / "model", num_hidden_layers=2)
    (tmp_path / "job.yaml").write_text(json.dumps(raw(tmp_path / "model")))
    command = ["plan", str(tmp_path / "job.yaml"), "--workers", "2", "--gpu-type", "H200", "--roofline"]
    assert cli.main(command) == 0
    assert "MFU at most" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["mfu"] < 1
    assert found["operators"][0]["seconds"] >= found["operators"][1]["seconds"] > 0
    assert found["memory_gib"]["step"]["total"] > 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"train": {"optimizer": "adamw_offload"}}, "train.optimizer: adamw_offload"),
        ({"train": {"activation_checkpointing": "offload"}}, "train.activation_checkpointing: offload"),
        ({"train": {"precision": "fp32"}}, "train.precision: fp32"),
        ({"compute": {"mesh": {"tensor_parallel_size": 2}}}, "compute.mesh.tensor_parallel_size"),
        ({"compute": {"mesh": {"context_parallel_size": 2}}}, "compute.mesh.context_parallel_size"),
        (
            {"model": {"path": "m", "replace": {"layers.*.mlp": {"use": "torch.nn:Identity"}}}},
            r"components of your own \(model.replace, model.head\)",
        ),
    ],
)
def test_what_is_not_counted_is_refused_by_its_key(change, what):
    raw = {
        "recipe": "sft",
        "model": {"path": "m"},
        "data": {"sources": {"a": {"path": "a.jsonl"}}},
        "train": {"steps": 1, "lr": 1e-4, "precision": "bf16"},
        "compute": {"workers": 2},
    }
    job = loads(json.dumps(raw | {key: raw.get(key, {}) | value for key, value in change.items()}))
    with pytest.raises(UserError, match=f"does not count {what}$"):
        raise_if_uncounted(job, "H100")


def test_a_head_over_few_positions_costs_the_bytes_that_it_moves():
    """Weights and logits' gradients in bf16, logits in fp32; the weight's gradient is read and written in fp32."""
    n, dim, vocab = 64, 1024, 151_936
    costs = head_costs(GPU, n, dim, vocab, 1 << 30, True)
    moved = {
        "head: logits": 2 * n * dim + 2 * dim * vocab + 4 * n * vocab,
        "head: softmax and loss": 4 * 4 * n * vocab,
        "head: gradient of the logits": 4 * n * vocab + 2 * n * vocab,
        "head: gradient of the input": 2 * n * vocab + 2 * dim * vocab + 2 * n * dim,
        "head: gradient of the weight": 2 * n * vocab + 2 * n * dim + 2 * 4 * dim * vocab,
    }
    assert costs.seconds == pytest.approx({name: moved[name] / (4.8e12 * 0.85) for name in moved}, rel=1e-9)
    frozen = head_costs(GPU, n, dim, vocab, 1 << 30, False)
    assert frozen.seconds.keys() == moved.keys() - {"head: gradient of the weight"}
