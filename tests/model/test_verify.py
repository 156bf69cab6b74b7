"""The logit verifier passes every family, and catches every seeded mistake."""

import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ptf.errors import UserError
from ptf.model import bridge
from ptf.model import verify as verify_module
from ptf.model.families import MODULES, family_of
from ptf.model.reference import random_reference
from ptf.model.verify import Reference, round_trip, their_balance, verify
from tests.model.mistakes import MISTAKES, Mistake
from tests.tiny import checkpoint


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODULES)
def test_family_equals_transformers(model_type: str) -> None:
    cases = [*verify(model_type, configs=12)]
    assert len(cases) == 12
    assert not [case for case in cases if not case.passed]


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.model_type}: {m.name}")
def test_mistake_is_caught(mistake: Mistake) -> None:
    with mistake.made():
        case = next(case for case in verify(mistake.model_type, configs=12, change=mistake.model) if not case.passed)
    assert case.problems or case.findings[-1].verdict == "fail"


def test_the_place_of_a_mistake_is_named() -> None:
    def change(model) -> None:
        model.layers[1].attn.o_proj.weight.data[0] += 1

    (case,) = verify("llama", configs=1, change=change)
    assert case.findings[-1].place.startswith("layer 1, attention")


@pytest.mark.parametrize("fails", [False, True])
def test_outputs_are_recorded_during_the_run_alone(fails) -> None:
    model = torch.nn.Linear(2, 2)

    def run() -> None:
        model(torch.ones(1, 2))
        if fails:
            raise KeyError("in the run")

    recorded = None
    with pytest.raises(KeyError) if fails else nullcontext():
        _, recorded = verify_module._record({"it": model}, run)
    if recorded is not None:
        model(torch.zeros(1, 2))
        assert [output.tolist() for output in recorded["it"]] == [model(torch.ones(1, 2)).tolist()]
    assert not model._forward_hooks


def test_what_is_neither_family_nor_directory_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="neither a directory"):
        next(verify(str(tmp_path)))


def test_stacked_experts_of_a_published_checkpoint_are_read_and_written(tmp_path: Path) -> None:
    """Qwen3.5's published checkpoints stack the experts, as transformers reads them; it saves each by itself."""
    config = family_of({"model_type": "qwen3_5_moe"}).random_config(random.Random("stacked"))
    model = random_reference(config, 0)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in whole.items() if ".experts." not in name}
    for stem in {name.split("experts.")[0] + "experts." for name in whole if ".experts." in name}:
        count = config["text_config"]["num_experts"]
        both = [torch.cat([whole[f"{stem}{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(count)]
        stored[f"{stem}gate_up_proj"] = torch.stack(both)
        stored[f"{stem}down_proj"] = torch.stack([whole[f"{stem}{e}.down_proj.weight"] for e in range(count)])
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    case = Reference(tmp_path, member=True).compare()
    assert case.problems == ()  # every tensor is written back under its name, byte for byte
    assert case.passed


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_checkpoint_may_store_its_embedding_twice(tmp_path: Path, equal: bool) -> None:
    """Otherwise it is not tied."""
    tensors = load_file(checkpoint(tmp_path) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if equal else 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ours = bridge.load(tmp_path)
    assert ours.config.tied is equal
    assert round_trip(ours, tmp_path) == []


def test_the_load_balancing_loss_is_that_of_families_that_have_one():
    documents = [torch.tensor([1, 2, 3])]
    for model_type, has in (("qwen3_moe", True), ("llama", False)):
        config = family_of({"model_type": model_type}).random_config(random.Random(0))
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        assert (their_balance(hf, documents) is not None) is has
