"""Components of the user's own: what keeps a tensor's name and shape is that tensor,
everything else goes by its unified name."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ptf.compute.checkpoint import load_tensors, tensors_of, write
from ptf.compute.world import World
from ptf.config.section import Plugin
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model import bridge, model_writer
from ptf.model.chunked import next_token_loss
from ptf.model.components import own_tensors, places
from ptf.model.decoder import Decoder
from ptf.model.families import family_of
from ptf.model.flops import Flops
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from ptf.model.reference import random_reference
from ptf.model.verify import packed, round_trip
from ptf.train.trainable import freeze
from ptf.train.trainer import load_model
from tests.model.own import DeepHead, GatedAttention, NarrowMLP, SameMLP, SameMoE, ScaledMLP
from tests.model.ranks import two_ranks, world_of
from tests.tiny import packed as packed_sequences

DENSE = ("qwen3", "gemma3_text", "llama")
MIXTURES = ("gpt_oss", "qwen3_moe")
FAMILIES = (*DENSE, *MIXTURES)


def checkpoint(model_type: str, directory: Path) -> Path:
    more = {"vocab_size": 131} | (
        {"mlp_only_layers": [], "decoder_sparse_step": 1} if model_type == "qwen3_moe" else {}
    )
    config = family_of({"model_type": model_type}).random_config(random.Random(3)) | more
    random_reference(config, 3).save_pretrained(directory)
    return directory


def loaded(directory: Path, replace: dict | None = None, seed: int = 0) -> tuple[Decoder, tuple[str, ...]]:
    model = bridge.build(directory, factory=LayerFactory(replace or {}))
    return model, model.give_weights(directory, torch.device("cpu"), seed=seed)


def states(model: Decoder) -> torch.Tensor:
    positions, segments = packed()
    tokens = torch.randint(0, model.config.vocab, segments.shape, generator=torch.Generator().manual_seed(0))
    return model(tokens, positions, segments, lambda x, head: x)[segments >= 0].detach()


def narrow(model_type: str) -> dict:
    return {"layers.*.moe" if model_type in MIXTURES else "layers.*.mlp": NarrowMLP}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_component_with_the_same_tensors_loads_and_exports_as_the_one_it_replaces(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    same = {"layers.*.moe": SameMoE} if model_type in MIXTURES else {"layers.*.mlp": SameMLP}
    model, new = loaded(directory, same)
    assert type(model.layers[1].moe or model.layers[1].mlp) is next(iter(same.values()))
    assert not new
    assert not own_tensors(model)
    assert torch.equal(states(model), states(loaded(directory)[0]))
    assert not round_trip(model, directory)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_component_with_other_tensors_begins_from_the_seed_and_is_exported_beside_the_model(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    model, new = loaded(directory, narrow(model_type), seed=5)
    inside = next(iter(narrow(model_type))).rpartition(".")[2]
    assert new == tuple(
        f"layers.{i}.{inside}.{name}.weight" for i in range(len(model.config.layers)) for name in ("into", "out")
    )
    again, other = loaded(directory, narrow(model_type), seed=5)[0], loaded(directory, narrow(model_type), seed=6)[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.get_parameter(new[0]), other.get_parameter(new[0]))
    assert not torch.equal(model.get_parameter(new[0]), model.get_parameter(new[2]))
    # as nn.Linear leaves it, not as random_init would
    assert model.get_parameter(new[0]).abs().max() <= model.config.dim**-0.5
    plain = load_file(directory / "model.safetensors")

    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    exported, own = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(tmp_path / "out" / "components.safetensors"),
    )
    assert tuple(sorted(own)) == tuple(sorted(new))
    assert {n for n in plain if ".mlp." not in n} == set(exported)
    assert all(torch.equal(plain[n], exported[n]) for n in exported)
    back, missing = loaded(tmp_path / "out", narrow(model_type), seed=7)
    assert not missing
    assert torch.equal(states(back), states(model))
    assert not torch.equal(states(other), states(model))  # negative control: the component matters

    received, _ = loaded(directory, narrow(model_type), seed=8)  # weight sync
    tensors = dict(model.hf_tensors())
    assert received.hf_names() == tensors.keys()
    received.load_hf_tensors(tensors)
    assert torch.equal(states(received), states(model))


@pytest.mark.parametrize("model_type", DENSE)
def test_one_tensor_more_leaves_the_others_as_they_are(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    replace = {"layers.0.mlp": partial(ScaledMLP, scale=2.0), "layers.*.attn": GatedAttention}
    model, new = loaded(directory, replace)
    assert new == (
        "layers.0.attn.gate",
        "layers.0.mlp.scale",
        *(f"layers.{i}.attn.gate" for i in range(1, len(model.config.layers))),
    )
    assert (model.layers[0].mlp.scale == 2).all()
    assert (model.layers[0].mlp.shift == 0.25).all()
    assert torch.equal(model.layers[0].mlp.up_proj.weight, loaded(directory)[0].layers[0].mlp.up_proj.weight)
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(directory / "model.safetensors").keys()
    assert load_file(tmp_path / "out" / "components.safetensors").keys() == set(new)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_declared_head_stands_for_the_vocabulary(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    model, new = loaded(directory, {"head": DeepHead})
    assert set(new) == {"head.into.weight", "head.out.weight", "head.out.bias"}
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    assert load_file(tmp_path / "out" / "head.safetensors").keys() == set(new)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    back, missing = loaded(tmp_path / "out", {"head": DeepHead}, seed=9)
    assert not missing
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_weights_of_own_components_are_those_of_their_constructors(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    drawn = []
    for seed in (1, 1, 2):
        model = bridge.build(directory, factory=LayerFactory(narrow(model_type) | {"head": DeepHead}))
        model.give_weights(Path(), torch.device("cpu"), random=True, seed=seed)
        drawn.append(dict(model.named_parameters()))
    name = "head.out.bias"
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])
    assert drawn[0][name].abs().max() > 0  # random_init alone would leave zeros


@pytest.mark.parametrize("model_type", FAMILIES)
def test_flops_count_what_stands_there(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    model = bridge.build(directory, factory=LayerFactory({**narrow(model_type), "head": DeepHead}))
    c = model.config
    attention = 2 * c.dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    flops = Flops.of(model)
    assert flops.per_token == 3 * len(c.layers) * (attention + 2 * 2 * c.dim * 24)  # forward, and twice that backward
    assert flops.per_target == 3 * 2 * 32 * (c.dim + c.vocab)


def _trained(directory: Path, spec: ModelConfig, checkpoints: Path, mesh: bool) -> dict[str, torch.Tensor]:
    """Two steps of two micro-batches, then the way through a distributed checkpoint into a model of another seed."""
    world = world_of(MeshSizes(shard=2)) if mesh else World()
    models = [load_model(directory, world, spec, seed=seed, precision="fp32") for seed in (3, 4)]
    model = models[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for batch in [packed_sequences([[20, 11]], 40, seed=2 * step + i) for i in range(2)][world.rank :: world.size]:
            loss, _ = model(batch.tokens, batch.positions, batch.segments, partial(next_token_loss, batch=batch))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    write(str(checkpoints), tensors_of(model, optimizer), {}, world)
    world.barrier()
    load_tensors(str(checkpoints), models[1], torch.optim.AdamW(models[1].parameters(), lr=1e-2), world)
    return {n: t.clone() for n, t in models[1].hf_tensors()}


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt_oss"])
def test_sharded_components_begin_train_and_checkpoint_as_one_process_does(tmp_path, model_type):
    directory = checkpoint(model_type, tmp_path / "m")
    replace = {
        pattern: Plugin(use=f"tests.model.own:{kind.__name__}")
        for pattern, kind in {**narrow(model_type), "layers.*.attn": GatedAttention}.items()
    }
    spec = ModelConfig(path=str(directory), replace=replace, head=Plugin(use="tests.model.own:DeepHead"))
    alone = _trained(directory, spec, tmp_path / "alone", False)
    ranks = two_ranks(partial(_trained, directory, spec, tmp_path / "both", True), tmp_path)
    begun = dict(load_model(directory, World(), spec, seed=3, precision="fp32").hf_tensors())
    assert {"own:head.out.bias", "own:layers.0.attn.gate"} <= alone.keys() == ranks[0].keys() == begun.keys()
    for name in alone:
        assert torch.allclose(alone[name], ranks[0][name], atol=1e-4), name
        # negative control: training moved it
        assert not torch.allclose(alone[name], begun[name], atol=1e-3) or not alone[name].any(), name


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt_oss"])
def test_own_components_get_adapters_where_they_ask_for_projections(tmp_path, model_type):
    """LoRA beside `model.replace`: a projection made by `factory.linear` is adapted and merged,
    what no checkpoint has trains whole."""
    directory = checkpoint(model_type, tmp_path / "m")
    same = {"layers.*.moe": SameMoE} if model_type in MIXTURES else {"layers.*.mlp": SameMLP}
    factory = LayerFactory({**same, "layers.*.attn": GatedAttention}, lora=Lora(rank=4))
    model = bridge.build(directory, factory=factory)
    freeze(model, None)
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trains if "lora" not in n} == {f"layers.{i}.attn.gate" for i in range(len(model.config.layers))}
    inside = next(iter(same)).rpartition(".")[2]
    assert any(n.startswith(f"layers.0.{inside}.") and n.endswith("lora_b") for n in trains)
    model.give_weights(directory, torch.device("cpu"))
    plain, _ = loaded(directory, {**same, "layers.*.attn": GatedAttention})
    assert torch.equal(states(model), states(plain))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(directory / "model.safetensors").keys()
    merged, missing = loaded(tmp_path / "out", {**same, "layers.*.attn": GatedAttention})
    assert not missing
    assert torch.allclose(states(merged), states(model), atol=1e-4)
    assert not torch.allclose(states(merged), states(plain), atol=1e-2)  # negative control


def test_a_pattern_that_replaces_nothing_is_refused(tmp_path):
    directory = checkpoint("qwen3", tmp_path / "m")
    with pytest.raises(UserError, match=r"layers\.\*\.moe matches nothing.*layers\.\*\.attn, layers\.\*\.mlp, head"):
        bridge.build(directory, factory=LayerFactory({"layers.*.moe": NarrowMLP}))
    with pytest.raises(UserError, match=r"layers\.0\.mlp matches nothing, or only what an earlier"):
        bridge.build(directory, factory=LayerFactory({"layers.*.mlp": NarrowMLP, "layers.0.mlp": ScaledMLP}))
    model = bridge.build(directory, factory=LayerFactory({"layers.0.mlp": ScaledMLP, "layers.*.mlp": NarrowMLP}))
    assert [type(layer.mlp).__name__ for layer in model.layers][:2] == ["ScaledMLP", "NarrowMLP"]
    assert "layers.0.attn" in places(model.config)


def test_tensors_of_other_components_are_refused(tmp_path):
    directory = checkpoint("qwen3", tmp_path / "m")
    model, _ = loaded(directory, {"layers.*.mlp": ScaledMLP})
    model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
    # the rest would load, and compute another function
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.scale.*no such tensor"):
        loaded(tmp_path / "out")
    own = load_file(tmp_path / "out" / "components.safetensors")
    own.pop("layers.0.mlp.scale")
    save_file(own, tmp_path / "out" / "components.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.scale: not there"):
        loaded(tmp_path / "out", {"layers.*.mlp": ScaledMLP})
    narrowed, _ = loaded(directory, narrow("qwen3"))
    model_writer.save_hf(narrowed.hf_tensors(), directory, tmp_path / "narrow", writes=True)
    (tmp_path / "narrow" / "components.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing: model\.layers\.1\.mlp"):
        loaded(tmp_path / "narrow")
