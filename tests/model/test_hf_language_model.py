"""Language models inside multimodal models of transformers: what trains, and what goes to the export as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.errors import UserError
from ptf.model import hf_backend, model_files, model_writer
from ptf.model.hf_checks import check
from ptf.recipes.sft.recipe import SFT
from ptf.train.model_source import ModelSource
from ptf.train.trainer import Trainer, load_model
from tests.model.wrappers import wrapper, wrapper_config
from tests.recipes.of_keys import of_keys
from tests.tiny import packed

QUICK = ["llava", "gemma4", "qwen2_5_vl"]
LONG = ["llama4", "gemma3", "glm4v_moe", "qwen3_vl_moe", "internvl", "idefics3", "mistral3", "aya_vision", "lfm2_vl"]
TYPES = [*QUICK, *(pytest.param(model_type, marks=pytest.mark.long) for model_type in LONG)]
TRAIN = TrainConfig(steps=3, lr=1e-2, schedule="constant", weight_decay=0.1, max_grad_norm=1.0, precision="fp32")


def loaded(directory: Path, **spec: Any) -> Any:
    """Load a model, which `ptf check` takes too."""
    model = ModelConfig(path="-", backend="hf", **spec)
    ModelSource(model, directory).raise_if_unfit("lm")
    return load_model(directory, World(), model, seed=0, precision="fp32")


def exported(model: Any, source: Path, directory: Path) -> dict[str, torch.Tensor]:
    carried = model.carried(source)
    model_writer.save_hf(model.hf_tensors(), source, directory, writes=True, carried=carried)
    return load_file(directory / "model.safetensors")


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The names of tensors that differ in a byte, or in dtype."""
    assert before.keys() == after.keys()
    return {n for n in before if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])}


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("model_type", TYPES)
def test_only_the_language_model_trains_and_the_rest_is_exported_as_it_is(model_type, tmp_path):
    source = wrapper(tmp_path / "m", model_type)
    before = load_file(source / "model.safetensors")
    outside = {name for name, *_ in hf_backend.build(source, head="lm").carried(source)}
    rounded = {n: t.to(torch.bfloat16) if n in outside and t.is_floating_point() else t for n, t in before.items()}
    save_file(rounded, source / "model.safetensors", metadata={"format": "pt"})  # of another dtype than the text
    model = loaded(source)
    assert {n for n, _ in model.hf.named_parameters()}.isdisjoint(model.outside.shapes)
    assert all(p.is_meta for _, _, part in model.outside.modules for p in part.parameters())  # no memory
    trainer = Trainer(model, World(), TRAIN)
    batch = packed([[9, 14, 7]], 32)
    losses = [trainer.step([batch], of_keys(SFT), step)["loss"] for step in range(3)]
    assert losses[-1] < losses[0]

    after = exported(model, source, tmp_path / "out")
    different = changed(rounded, after)
    assert different.isdisjoint(outside)
    assert len(different) > 0.8 * (len(before) - len(outside))
    damaged = next(n for n in sorted(outside) if after[n].dim())
    assert changed(rounded, {**after, damaged: after[damaged] + 1}) - different == {damaged}  # control

    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    start = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    tokens = batch.tokens % 90  # without the ids that stand for images
    with torch.no_grad():
        ours = model(tokens, batch.positions, batch.segments, lambda x, head: head.logits(x))
    for document in range(3):
        at = batch.segments == document
        expected = logits(whole, tokens[at])
        assert (ours[at] - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (ours[at] - logits(start, tokens[at])).abs().max() > 1e-2 * expected.abs().max()  # control
    assert model_files.read_config(tmp_path / "out") == model_files.read_config(source)


def test_the_layers_are_those_of_the_language_model(tmp_path):
    """The vision tower, which comes first in the model, has as many."""
    model = loaded(wrapper(tmp_path / "m", "llava"))
    assert model.hf.config.vision_config.num_hidden_layers == len(model.layers) == 2
    names = dict(model.hf.named_modules())
    assert model.layers is names["model.language_model.layers"]


def test_names_come_back_as_the_checkpoint_has_them(tmp_path):
    """transformers writes the older names of llava, and reads those of its modules too."""
    source = wrapper(tmp_path / "m", "llava")
    older = load_file(source / "model.safetensors")
    ours = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}

    def newer(name: str) -> str:
        return next(
            (new + name.removeprefix(old) for old, new in ours.items() if name.startswith(old)), f"model.{name}"
        )

    stored = {newer(name): tensor for name, tensor in older.items()}
    assert stored.keys().isdisjoint(older)
    for i, tensors in enumerate((older, stored)):
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        model = loaded(source)
        assert changed(tensors, exported(model, source, tmp_path / f"out-{i}")) == set()


def test_logits_are_scaled_as_the_whole_model_scales_them(tmp_path):
    """A language model's own factor and soft-cap are left out by some of the models around it, and kept by others."""
    for model_type, key, scale, cap in (
        ("aya_vision", "logit_scale", 1.0, None),
        ("gemma4", "final_logit_softcapping", 1.0, 5.0),
    ):
        source = wrapper(tmp_path / model_type, model_type)
        config = json.loads((source / "config.json").read_text())
        config["text_config"][key] = 5.0
        (source / "config.json").write_text(json.dumps(config))
        model = loaded(source)
        assert (model.scale, model.softcap) == (scale, cap)
    model.hf.lm_head.register_forward_hook(lambda module, args, output: output + 0.1 * output.abs().sqrt())
    with pytest.raises(UserError, match="the logits of gemma4 are not its head applied"):
        check(model)


def test_text_that_depends_on_the_rest_is_refused(tmp_path):
    model = loaded(wrapper(tmp_path / "m", "llava"))
    _, _, projector = next(part for part in model.outside.modules if "projector" in part[1])

    def add(module: Any, args: Any, output: Any) -> Any:
        return output + projector(torch.zeros(1, 32)).sum()

    model.hf.lm_head.register_forward_hook(add)
    with pytest.raises(UserError, match="the logits of llava are not its head applied"):
        check(model)


LORA = {"rank": 4, "alpha": 8}


def test_what_lies_outside_the_language_model_is_refused_by_name(tmp_path):
    source = wrapper(tmp_path / "m", "llava")
    with pytest.raises(UserError, match=r"model.trainable: model.vision_tower is outside the language model of llava"):
        loaded(source, trainable=["model.vision_tower"])
    with pytest.raises(UserError, match=r"model.lora.targets: model\.vision_tower\.\* is outside the language model"):
        loaded(source, lora={**LORA, "targets": ["*.q_proj", "model.vision_tower.*"]})
    model = loaded(source, lora={**LORA, "targets": ["*.q_proj"]}, trainable=["lm_head"])  # control
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 5
    assert all("language_model" in n or "lm_head" in n for n in trained)


def test_what_cannot_be_trained_is_refused_before_anything_is_built(tmp_path):
    for model_type, word in (
        ("paligemma", r"paligemma\): its tokens attend to later ones"),
        ("florence2", "it has an encoder"),
        ("qwen2_5_omni", "multimodal|no causal language model"),
    ):
        config = wrapper_config(model_type, 97) if model_type == "paligemma" else AutoConfig.for_model(model_type)
        config.save_pretrained(tmp_path / model_type)
        with pytest.raises(UserError, match=word):
            hf_backend.build(tmp_path / model_type)
    source = wrapper(tmp_path / "m", "llava")
    with pytest.raises(UserError, match="llava is multimodal, and a scalar head"):
        hf_backend.build(source, head="scalar")


def test_layers_that_text_does_not_use_are_refused(tmp_path):
    source = wrapper(tmp_path / "m", "mllama")
    with pytest.raises(UserError, match="layers 1 of mllama take no part in what is computed of text"):
        loaded(source)
    loaded(source, trainable=["model.language_model.layers.0", "model.language_model.layers.2"])  # the way out


@pytest.mark.long
def test_random_weights_are_drawn_for_the_whole_model(tmp_path):
    source = wrapper(tmp_path / "m", "llava")
    before = load_file(source / "model.safetensors")
    model = loaded(source, init="random")
    after = exported(model, source, tmp_path / "out")
    assert after.keys() == before.keys()
    assert any("vision_tower" in name and not torch.equal(before[name], after[name]) for name in before)
