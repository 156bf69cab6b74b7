"""LoRA: an adapter changes nothing until it is trained, and what it changes is the same merged, exported,
sharded or read by PEFT."""

import json
import random
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.errors import UserError
from ptf.model import bridge, model_writer
from ptf.model.chunked import cross_entropy
from ptf.model.components import OWN
from ptf.model.decoder import Decoder
from ptf.model.families import family_of
from ptf.model.layers import LayerFactory
from ptf.model.lora import Linear, Lora, adapter_names, adapters, adapters_off, grouped
from ptf.model.model_directory import AdapterDirectory
from ptf.model.peft_format import save
from ptf.model.reference import quiet, random_reference, reference
from ptf.model.verify import packed
from ptf.train.trainable import freeze
from ptf.train.trainer import load_model
from tests.model.own import NarrowMLP
from tests.model.ranks import two_ranks, world_of
from tests.tiny import packed as packed_sequences

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss")
SHARED = ("qwen2_moe", "glm4_moe", "deepseek_v3")  # with a shared expert
LORA = Lora(4, 8.0)
EXPERTS_ALONE = Lora(4, 8.0, targets=("layers.*.moe.experts.down_proj",))
ONE = Lora(4, 16.0, targets=("layers.0.attn.q_proj",))


def checkpoint(model_type: str, directory: Path, **more) -> Path:
    """A random member of the family; in a mixture of experts, all layers are."""
    more = (
        {"vocab_size": 131}
        | more
        | ({"mlp_only_layers": [], "decoder_sparse_step": 1} if model_type in ("qwen3_moe", "qwen2_moe") else {})
        | ({"first_k_dense_replace": 0} if model_type in ("glm4_moe", "deepseek_v3") else {})
    )
    config = family_of({"model_type": model_type}).random_config(random.Random(3)) | more
    random_reference(config, 3).save_pretrained(directory)
    return directory


def loaded(directory: Path, lora: Lora | None, **parts) -> Decoder:
    return bridge.load(directory, factory=LayerFactory(lora=lora, **parts))


@torch.no_grad()
def trained(model: Decoder, size: float = 0.1) -> Decoder:
    """Add random values to the adapters, as if they had been trained."""
    g = torch.Generator().manual_seed(1)
    for name in sorted(adapter_names(model)):
        p = model.get_parameter(name)
        p += size * torch.randn(p.shape, generator=g)
    return model


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    positions, segments = packed()
    tokens = torch.randint(0, model.config.vocab, segments.shape, generator=torch.Generator().manual_seed(0))
    return model(tokens, positions, segments, lambda x, head: head.logits(x))[segments >= 0]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_new_adapter_changes_nothing_and_without_it_a_trained_model_is_its_base(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    base, model = logits(loaded(directory, None)), loaded(directory, LORA)
    assert torch.equal(logits(model), base)
    trained(model)
    assert relative(logits(model), base) > 1e-2
    with adapters_off(model):
        assert torch.equal(logits(model), base)
        with adapters_off(model):
            pass
        assert torch.equal(logits(model), base), "the inner one must not turn them on"
    assert relative(logits(model), base) > 1e-2
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        1 / 0  # noqa: B018
    assert relative(logits(model), base) > 1e-2


@pytest.mark.parametrize("model_type", [*FAMILIES, *SHARED])
def test_the_merged_model_is_the_adapted_one(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    model = loaded(directory, LORA)
    trained(model)
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "merged", writes=True)
    assert {name for name, _ in model.hf_tensors()} == loaded(directory, None).hf_names()
    assert relative(logits(loaded(tmp_path / "merged", None)), logits(model)) <= 1e-5
    with torch.no_grad():  # negative control: a merge that forgot one adapter is seen
        model.get_parameter(next(iter(adapters(model).values())).b).mul_(1.5)
    assert relative(logits(loaded(tmp_path / "merged", None)), logits(model)) > 1e-4


def test_every_projection_but_routers_and_head_is_a_target_unless_the_job_says_otherwise(tmp_path):
    mixture = loaded(checkpoint("qwen3_moe", tmp_path / "m"), LORA)
    attention = {f"attn.{p}_proj.weight" for p in "qkvo"}
    last = {name.split(".", 2)[2] for name in adapters(mixture) if name.startswith("layers.1.")}
    assert last == attention | {f"moe.experts.{p}_proj" for p in ("gate", "up", "down")}
    few = loaded(tmp_path / "m", Lora(targets=("layers.0.attn.[qv]_proj", "layers.*.moe.router")))
    assert {n for n in adapters(few) if n.startswith("layers.0.")} == {
        f"layers.0.{p}.weight" for p in ("attn.q_proj", "attn.v_proj", "moe.router")
    }
    assert {n for n in adapters(few) if n.startswith("layers.1.")} == {"layers.1.moe.router.weight"}


def test_a_target_that_matches_nothing_is_refused_with_the_names_there_are(tmp_path):
    directory = checkpoint("qwen3_moe", tmp_path / "m")
    with pytest.raises(UserError) as error:
        loaded(directory, Lora(targets=("layers.*.attn.q_proj", "*.query", "head", "layers.*.mlp.up_proj")))
    text = str(error.value)
    assert text.startswith(
        "model.lora.targets: *.query, head, layers.*.mlp.up_proj matches nothing; there is layers.*.attn.q_proj, "
    )
    assert "layers.*.moe.experts.up_proj" in text
    assert "\n" not in text


def test_the_scale_is_alpha_over_the_rank():
    lora, scale = Lora(16, 32.0), 2.0
    assert lora.scale == scale
    layer = Linear(24, 8, bias=True, lora=lora).double()
    with torch.no_grad():
        layer.lora_a.normal_()
        layer.lora_b.normal_()
    x = torch.randn(3, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ (layer.weight + scale * layer.lora_b @ layer.lora_a).T + layer.bias)


def test_experts_adapters_are_those_of_each_tokens_expert(tmp_path):
    model = loaded(checkpoint("gpt_oss", tmp_path / "m"), LORA)
    experts: Any = trained(model).layers[0].moe.experts
    n, (count, out, into) = 40, experts.gate_proj.shape
    x, expert = torch.randn(n, into), torch.randint(0, count, (n,)).sort().values
    ends = torch.bincount(expert, minlength=count).cumsum(0).to(torch.int32)
    a, b = experts.gate_proj_lora_a, experts.gate_proj_lora_b
    one_by_one = torch.stack([LORA.scale * b[e] @ (a[e] @ row) for row, e in zip(x, expert.tolist(), strict=True)])
    assert one_by_one.shape == (n, out)
    torch.testing.assert_close(grouped(experts, experts.adapters["gate_proj"], x, ends), one_by_one)


def test_adapters_begin_from_seed_and_name_and_leave_random_weights_as_they_were(tmp_path):
    directory = checkpoint("qwen3", tmp_path / "m")
    spec = ModelConfig(path=str(directory), init="random", lora=LoraConfig(rank=4))

    def start(seed, spec=spec):
        return dict(load_model(directory, World(), spec, seed=seed, precision="fp32").named_parameters())

    first, again, other, plain = start(1), start(1), start(2), start(1, ModelConfig(path=str(directory), init="random"))
    read = start(1, ModelConfig(path=str(directory), lora=LoraConfig(rank=4)))
    for name, p in first.items():
        assert torch.equal(p, again[name])
        if name.endswith("lora_b"):
            assert not p.any()
        elif name.endswith("lora_a"):
            assert p.abs().max() <= p.shape[-1] ** -0.5
            assert p.std() > 0.5 * p.shape[-1] ** -0.5
            assert not torch.equal(p, other[name])
            assert torch.equal(p, read[name])
        else:
            assert torch.equal(p, plain[name])
    assert not torch.equal(first["layers.0.attn.q_proj.lora_a"], first["layers.1.attn.q_proj.lora_a"])


def gradients(model: Decoder) -> set[str]:
    batch = packed_sequences([[30, 11]], 48)
    head_fn = partial(cross_entropy, targets=batch.targets, weights=batch.loss_weights)
    model(batch.tokens, batch.positions, batch.segments, head_fn).backward()
    return {name for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gradients_go_where_something_trains_and_nowhere_else(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")

    def start(**more):
        return load_model(directory, World(), ModelConfig(path=str(directory), **more), seed=0, precision="fp32")

    adapted = start(lora=LoraConfig(rank=2))
    assert gradients(adapted) == adapter_names(adapted) != set()
    both = start(lora=LoraConfig(rank=2), trainable=["norm", "layers.1.attn.q_proj"])
    q_proj = {n for n, _ in both.named_parameters() if n.startswith("layers.1.attn.q_proj.")}
    assert gradients(both) == adapter_names(both) | {"norm.weight"} | q_proj
    some = start(trainable=["layers.0", "embed"])
    assert gradients(some) == {
        n for n, _ in some.named_parameters() if n.startswith("layers.0.") or n == "embed.weight"
    }
    every = start()
    assert gradients(every) == {n for n, _ in every.named_parameters()}
    with pytest.raises(
        UserError,
        match=r"model\.trainable: layers\.\*\.query matches nothing; there is embed\.weight, "
        r"layers\.\*\.attn_norm\.weight, ",
    ):
        start(trainable=["layers.*.query", "norm"])


def test_what_no_checkpoint_has_trains_beside_the_adapters(tmp_path):
    directory = checkpoint("qwen3", tmp_path / "m")
    spec = ModelConfig(path=str(directory), lora=LoraConfig(rank=2))
    scalar = load_model(directory, World(), spec, seed=0, precision="fp32", head="scalar")
    assert {n for n, p in scalar.named_parameters() if p.requires_grad} == {*adapter_names(scalar), "head.weight"}
    assert scalar.peft().obstacles() == ["head.weight (not an adapter)"]


def test_a_component_of_the_users_own_trains_whole_and_its_projections_may_be_adapted(tmp_path):
    directory = checkpoint("qwen3", tmp_path / "m")
    model = loaded(
        directory,
        Lora(4, 8.0, targets=("layers.0.mlp.into", "layers.0.attn.q_proj")),
        replace={"layers.0.mlp": NarrowMLP},
    )
    freeze(model, None)
    assert {n for n, p in model.named_parameters() if p.requires_grad} - adapter_names(model) == {
        "layers.0.mlp.into.weight",
        "layers.0.mlp.out.weight",
    }
    mlp: Any = trained(model).layers[0].mlp
    found = dict(model.hf_tensors())
    torch.testing.assert_close(
        found[OWN + "layers.0.mlp.into.weight"], mlp.into.weight + 2 * mlp.into.lora_b @ mlp.into.lora_a
    )
    assert torch.equal(found[OWN + "layers.0.mlp.out.weight"], mlp.out.weight)
    assert "layers.0.mlp.into.weight (Hugging Face has no such projection)" in model.peft().obstacles()


@pytest.mark.parametrize("lora", [LORA, ONE, EXPERTS_ALONE], ids=["all", "one", "experts"])
@pytest.mark.parametrize("model_type", [*FAMILIES, "gemma3", "olmo2", "phi3", "qwen3_5_text", *SHARED])
def test_peft_and_we_read_the_adapter_that_we_wrote(tmp_path, model_type, lora):
    from peft import PeftModel

    quiet()
    if lora is EXPERTS_ALONE and model_type not in ("qwen3_moe", "gpt_oss"):
        return
    if lora is LORA and model_type in SHARED:
        lora = replace(LORA, targets=("layers.*.attn.*_proj",))
    if lora is ONE and model_type == "deepseek_v3":
        lora = replace(ONE, targets=("layers.0.attn.kv_a_proj", "layers.0.attn.kv_b_proj"))
    directory = checkpoint(model_type, tmp_path / "m")
    model = loaded(directory, lora)
    form = trained(model).peft()
    save(form.tensors(), form.config(str(directory)), tmp_path / "adapter", writes=True)
    again = loaded(directory, lora)
    again.peft().copy(load_file(tmp_path / "adapter" / "adapter_model.safetensors").__getitem__)
    assert torch.equal(logits(again), logits(model))
    tokens = torch.randint(0, model.config.vocab, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(
            tokens, torch.arange(40)[None], torch.zeros(1, 40, dtype=torch.long), lambda x, head: head.logits(x)
        )
        with adapters_off(model):
            base = model(
                tokens, torch.arange(40)[None], torch.zeros(1, 40, dtype=torch.long), lambda x, head: head.logits(x)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = (
                PeftModel.from_pretrained(reference(directory), tmp_path / "adapter").eval()(input_ids=tokens).logits
            )
    assert relative(theirs, ours) <= 1e-5
    assert relative(base, ours) > 1e-3, "negative control: without the adapter"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    if lora is ONE and model_type == "qwen3":
        assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
        assert config["lora_alpha"] == 16, "8 / √4 · 4"


@pytest.mark.parametrize("model_type", SHARED)
def test_adapters_of_shared_experts_are_refused_by_the_adapter_format(tmp_path, model_type):
    model = loaded(checkpoint(model_type, tmp_path / "m"), LORA)
    adapted = {n for n in adapters(model) if ".shared." in n}
    assert any(n.endswith("shared.down_proj.weight") for n in adapted)
    assert not any(n.endswith("shared_gate.weight") for n in adapters(model))
    model.requires_grad_(False)
    named = {text.split(" (")[0] for text in model.peft().obstacles()}
    assert adapted <= named
    assert any(".experts." in n for n in named) == (model_type == "qwen2_moe")


@pytest.mark.parametrize("lora", [LORA, ONE], ids=["all", "one"])
def test_an_adapter_of_projections_that_share_a_tensor_is_read_back(tmp_path, lora):
    directory = checkpoint("phi3", tmp_path / "m")
    model = loaded(directory, lora)
    form = trained(model).peft()
    config = form.config(str(directory))
    assert config["r"] == 3 * lora.rank
    save(form.tensors(), config, tmp_path / "adapter", writes=True)
    stored = AdapterDirectory.read(tmp_path / "adapter")
    again = bridge.load(directory, factory=stored.factory(directory))
    stored.fill(again)
    torch.testing.assert_close(logits(again), logits(model))
    odd = {**config, "r": 4}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(odd))
    with pytest.raises(UserError, match=r"3 projections share a tensor, .* a multiple of 3"):
        AdapterDirectory.read(tmp_path / "adapter").factory(directory)


def test_what_the_adapter_format_cannot_hold_is_named(tmp_path):
    directory = checkpoint("qwen3_moe", tmp_path / "m")
    found = {}
    for name, spec in {
        "router": {"lora": {"targets": ["*.router"]}},
        "norm": {"lora": {}, "trainable": ["norm"]},
        "nothing": {"lora": {}},
    }.items():
        model = load_model(directory, World(), ModelConfig(path=str(directory), **spec), seed=0, precision="fp32")
        found[name] = model.peft().obstacles()
    assert found["nothing"] == []
    assert found["norm"] == ["norm.weight (not an adapter)"]
    assert found["router"][0] == "layers.0.moe.router.weight (PEFT and vLLM adapt no routers)"
    config = json.loads((directory / "config.json").read_text()) | {"mlp_only_layers": [0]}
    mixed = tmp_path / "mixed"
    random_reference(config, 0).save_pretrained(mixed)
    model = loaded(mixed, LORA)
    model.requires_grad_(False)
    assert [n.split(" (")[0] for n in model.peft().obstacles()] == [
        f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    ]


# 2 ranks divide it
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 48, "intermediate_size": 64}


def steps(directory: Path, mesh: tuple[int, int, int] | None) -> dict[str, Tensor]:
    """A few steps of training adapters, the last layer's attention and the final norm: the losses,
    and what is exported then."""
    world = World() if mesh is None else world_of(MeshSizes(replicate=mesh[0], shard=mesh[1], tensor=mesh[2]))
    spec = ModelConfig(path=str(directory), lora=LoraConfig(rank=4, alpha=8), trainable=["norm", "layers.1.attn"])
    model = load_model(directory, world, spec, seed=0, precision="fp32")
    # AdamW would make much of a gradient's rounding
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    losses = []
    for step in range(4):
        batches = [
            packed_sequences([rows], 48, seed=10 * step + i)
            for i, rows in enumerate([[30, 11], [48], [5, 41], [17, 30]])
        ]
        units, total = sum(float(b.loss_weights.sum()) for b in batches), 0.0
        for b in batches[world.data_rank :: world.meshes.sizes.data]:
            loss = model(
                b.tokens, b.positions, b.segments, partial(cross_entropy, targets=b.targets, weights=b.loss_weights)
            )
            (loss / units).backward()
            total += float(loss.detach()) / units
        losses.append(float(world.sum(total)))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": torch.tensor(losses),
        **dict([*model.hf_tensors(), *model.peft().tensors()]),
    }


MESHES = {"sharded": (1, 2, 1), "tensor": (1, 1, 2)}


def on_both(place: Path) -> dict[str, dict[str, Tensor]]:
    return {f"{family} {how}": steps(place / family, mesh) for family in FAMILIES for how, mesh in MESHES.items()}


@pytest.mark.cluster
def test_two_ranks_train_and_export_what_one_does(tmp_path):
    alone = {}
    for family in FAMILIES:
        experts = {"qwen3_moe": {"num_experts": 4}, "gpt_oss": {"num_local_experts": 4}}.get(family, {})
        checkpoint(family, tmp_path / family, **EVEN, **experts)
        alone[family], fresh = steps(tmp_path / family, None), dict(loaded(tmp_path / family, None).hf_tensors())
        moved = [name for name in fresh if relative(alone[family][name], fresh[name]) > 1e-3]
        assert {p for p in ("q_proj", "down_proj") for n in moved if p in n} == {"q_proj", "down_proj"}, (
            "negative control: something must have been trained"
        )
    for both in two_ranks(partial(on_both, tmp_path), tmp_path):
        for run, pair in both.items():
            one = alone[run.split()[0]]
            assert pair.keys() == one.keys()
            for name, value in one.items():
                assert float((pair[name] - value).abs().max()) <= 1e-4 * float(value.abs().max()) + 1e-7, (run, name)
