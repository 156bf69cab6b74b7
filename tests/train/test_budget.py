"""What `ptf plan` says, against what is there: saved activations, real shards, and the advice it gives."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from ptf.cli import main
from ptf.config import loads
from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from ptf.model.activation_memory import CountedAttend, activation_bytes
from ptf.model.decoder import Decoder
from ptf.model.families import family_of
from ptf.model.kernels.choice import PLAIN, Kernels
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora, adapter_names
from ptf.model.rope import rotary
from ptf.train.budget import Budget, _sizes, budget
from tests.tiny import SIZES

DENSE = {
    "model_type": "qwen3",
    **SIZES,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}

# beside Qwen3: experts, shared ones, sinks, more and fewer norms, norms of the width, factors, soft-caps, queries that
# grow, latent and linear attention
EXPERTS = ("qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe", "deepseek_v3")
WHOSE_LAYERS_DIFFER = (*EXPERTS, "gemma2", "gemma3_text", "olmo2", "granite", "phi3", "ministral3", "qwen3_5_text")


def directory(path: Path, config: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def job(
    path: Path, *, tensor: int = 1, replicate: int = 1, workers: int = 1, model: dict | None = None, **train
) -> str:
    raw = {
        "recipe": "sft",
        "output": str(path / "runs"),
        "model": {"path": str(path), **(model or {})},
        "data": {"sources": {"a": {"path": "a.jsonl"}}, "seq_len": 2048, "partitions": 512},
        "train": {
            "steps": 1,
            "lr": 1e-5,
            "global_batch_sequences": 512,
            "micro_batch_sequences": 4,
            "precision": "bf16",
            **train,
        },
        "compute": {"workers": workers, "mesh": {"tensor_parallel_size": tensor, "replicate": replicate}},
    }
    return yaml.safe_dump(raw)


def planned(path: Path, config: dict, gpus: int, **more) -> Budget:
    options = {k: more.pop(k) for k in ("room_gib", "mfu", "gpu") if k in more}
    return budget(loads(job(directory(path, config), workers=gpus, **more)), path, gpus, **options)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize(("gpus", "tensor", "replicate"), [(1, 1, 1), (8, 1, 1), (8, 2, 2), (512, 4, 1)])
def test_a_gpu_holds_its_share_of_the_weights(tmp_path, config, gpus, tensor, replicate) -> None:
    found = planned(tmp_path, config, gpus, tensor=tensor, replicate=replicate)
    share = 4 * found.parameters * replicate / gpus
    assert share <= found.memory.weights <= 1.15 * share  # norms and router are whole over the tensor group
    assert found.memory.optimizer == 2 * found.memory.gradients == 2 * found.memory.weights
    assert found.mesh == MeshSizes(replicate=replicate, shard=gpus // tensor // replicate, tensor=tensor)


def small_decoder(model_type: str, adapted: bool, kernels: Kernels = PLAIN) -> Decoder:
    """A random member of a family, which trains, or whose adapters do."""
    family = family_of({"model_type": model_type})
    config = family.config(family.random_config(random.Random(3)) | {"hidden_size": 64, "intermediate_size": 128})
    model = Decoder(config, LayerFactory(lora=Lora(rank=4) if adapted else None, kernels=kernels))
    for name, p in model.named_parameters():
        p.requires_grad_(p.is_floating_point() and (not adapted or name in adapter_names(model)))
    return model


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", [*WHOSE_LAYERS_DIFFER, "qwen3"])
def test_activations_are_those_that_autograd_saves(model_type, dtype, adapted) -> None:
    model = small_decoder(model_type, adapted)
    config, factory = model.config, model.factory
    layer = next((i for i, kind in enumerate(config.layers) if kind.delta), 0)
    expected = activation_bytes(config, layer, factory, dtype, 1, model.layers[layer], compiled=False).everything
    block, tokens = model.layers[layer].to(dtype), 256
    x = torch.randn(1, tokens, config.dim).to(dtype).requires_grad_()
    own, saved = {p.untyped_storage()._cdata for p in block.parameters()}, {}
    table = rotary(torch.arange(tokens)[None], config.rotary_dim, config.layers[0].rope)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.untyped_storage()._cdata, t) is None or t, lambda t: t
    ):
        out = block(x, table, CountedAttend(tokens, "cpu"), torch.ones(1, tokens, dtype=torch.bool))
    real = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own) / tokens
    assert out.shape == x.shape
    assert expected == pytest.approx(real, rel=0.12)


def test_an_optimizer_in_host_memory_has_a_bucket_on_the_gpu(tmp_path) -> None:
    there, away = (planned(tmp_path, DENSE, 1, optimizer=name) for name in ("adamw", "adamw_offload"))
    assert there.memory.optimizer == 8 * there.trained
    assert away.memory.optimizer == min(there.memory.optimizer, 256 << 20)
    assert there.memory.total - away.memory.total == there.memory.optimizer - away.memory.optimizer
    # without activations, what is saved and resumed needs most
    little = planned(
        tmp_path,
        {**DENSE, "num_hidden_layers": 64, "vocab_size": 64},
        1,
        optimizer="adamw_offload",
        micro_batch_sequences=1,
        activation_checkpointing="block",
    )
    assert little.memory.total == 16 * little.trained


def test_what_does_not_fit_is_named_and_what_would_fit_is_said(tmp_path, capsys) -> None:
    directory(tmp_path, DENSE)
    file = tmp_path / "job.yaml"
    file.write_text(job(tmp_path))
    assert main(["plan", str(file), "--workers", "8", "--gpu-memory-gib", "0.7"]) == 1
    text = capsys.readouterr().out
    assert "does not fit: activations take most" in text
    assert "--fit finds what to change" in text
    assert main(["plan", str(file), "--workers", "8", "--gpu-memory-gib", "0.7", "--fit"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Give ")]
    assert main(["plan", str(file), "--gpu-memory-gib", "0.7", *line.removeprefix("Give ").split()]) == 0


def test_logits_are_a_chunk_of_a_gpu_or_all_that_there_are(tmp_path) -> None:
    def logits(config: dict, **more) -> float:
        rows, tokens = config["vocab_size"], 2048
        found = planned(tmp_path, config, 1, micro_batch_sequences=1, **more)
        element = 4 if more else 2
        # the last layer's output, its norm, the rows that are trained and their gradients
        return found.memory.logits - 4 * tokens * 512 * element - (4 + element) * rows * 512

    large = {**DENSE, "vocab_size": 1 << 18}
    assert logits(DENSE) == 1.5 * 4 * 2048 * 4096
    assert logits(large) == 1.5 * 2**30
    assert logits(large, precision="fp32") == 2**30
    gemma = {**large, "model_type": "gemma3_text", "head_dim": 64, "final_logit_softcapping": 30.0}
    assert logits(gemma) == 2.5 * 2**30


def test_lora_has_no_gradients_of_what_is_frozen(tmp_path) -> None:
    whole, adapted = planned(tmp_path, DENSE, 2), planned(tmp_path, DENSE, 2, model={"lora": {"rank": 8}})
    assert adapted.trained < 0.1 * whole.trained
    assert adapted.memory.optimizer < 0.1 * whole.memory.optimizer
    assert 0.5 * whole.flops < adapted.flops < 0.75 * whole.flops


def test_weights_that_do_not_train_take_two_bytes_where_nothing_is_lost(tmp_path) -> None:
    lora = {"lora": {"rank": 8}}
    for dtype, precision, size in (
        ("bfloat16", "bf16", 2),
        ("float32", "bf16", 4),
        ("float16", "bf16", 4),
        ("bfloat16", "fp32", 4),
    ):
        found = planned(tmp_path, {**DENSE, "dtype": dtype}, 1, model=lora, precision=precision)
        assert found.memory.weights == 4 * found.trained + size * (found.parameters - found.trained), (dtype, precision)


def test_a_reference_has_weights_of_its_own_unless_adapters_make_it_the_model(tmp_path) -> None:
    def plan(recipe: str, lora: dict | None = None) -> Budget:
        text = job(directory(tmp_path, DENSE), model={"lora": lora} if lora else None).replace(
            "recipe: sft", f"recipe: {recipe}"
        )
        return budget(loads(text), tmp_path, 1)

    sft, dpo, adapted, own = plan("sft"), plan("dpo"), plan("sft", {"rank": 4}), plan("dpo", {"rank": 4})
    assert dpo.memory.weights == 1.5 * sft.memory.weights  # in bf16
    assert dpo.memory.gradients == sft.memory.gradients
    assert own.memory == adapted.memory
    assert dpo.flops / sft.flops == pytest.approx(4 / 3)  # a forward pass more
    assert own.flops > adapted.flops


def test_a_teacher_counts_as_large_as_it_is_unless_it_was_asked_ahead(tmp_path) -> None:
    teacher = directory(tmp_path / "teacher", {**DENSE, "num_hidden_layers": 2 * DENSE["num_hidden_layers"]})
    plain = job(directory(tmp_path, DENSE))

    def plan(**algo: object) -> Budget:
        text = plain.replace(
            "recipe: sft", f"recipe: kd\nalgo: {json.dumps({'teachers': {'big': {'path': str(teacher)}}, **algo})}"
        )
        return budget(loads(text), tmp_path, 1)

    sft, alone, beside, ahead = (
        budget(loads(plain), tmp_path, 1),
        budget(loads(plain), teacher, 1),
        plan(),
        plan(top_k=8, precompute=True),
    )
    assert beside.memory.weights == sft.memory.weights + alone.memory.weights / 2
    assert beside.memory.gradients == sft.memory.gradients
    assert beside.flops - sft.flops == pytest.approx(alone.flops / 3)
    assert ahead.memory == sft.memory
    assert ahead.flops == sft.flops


def test_time_is_flops_over_what_the_gpus_reach(tmp_path) -> None:
    slow, fast = planned(tmp_path, DENSE, 4, mfu=0.2), planned(tmp_path, DENSE, 8, mfu=0.4)
    assert slow.flops == fast.flops
    assert slow.seconds == pytest.approx(4 * fast.seconds)
    assert slow.seconds == pytest.approx(slow.flops / (4 * 989e12 * 0.2))


@pytest.mark.parametrize(("more", "message"), [({"tensor": 8}, "key-value heads"), ({"gpu": "TPU"}, "H100")])
def test_what_cannot_be_planned_is_refused(tmp_path, more, message) -> None:
    with pytest.raises(UserError, match=message):
        planned(tmp_path, DENSE, 8, **more)


@pytest.mark.parametrize("name", ["sft/qwen3_0p6b", "sft/qwen3_235b_a22b", "scale/qwen3_8b_256k"])
def test_configs_of_real_models_can_be_planned_from_a_config_json(tmp_path, name, capsys) -> None:
    """Their config.json is on the hub; here a small one of the same family stands for it."""
    directory(tmp_path, MOE if "235b" in name else DENSE)
    assert main(["plan", f"configs/{name}.yaml", "--workers", "8", "--set", f"model.path={tmp_path}"]) in (0, 1)
    assert "GiB on each GPU" in capsys.readouterr().out


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)])
def test_the_largest_layer_counts_whichever_it_is(sizes):
    class Layer(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(n))
            self.codes = nn.Parameter(torch.zeros(2 * n, dtype=torch.uint8), requires_grad=False)

    model: Any = nn.Module()
    model.layers, model.head = nn.ModuleList(map(Layer, sizes)), None
    found = _sizes(model)
    assert (found.block, found.block_trained, found.block_quantised) == (5, 5, 10)
