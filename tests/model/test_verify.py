"""The logit verifier passes every family, and catches every seeded mistake."""

import json
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ptf.errors import UserError
from ptf.model import verify as verify_module
from ptf.model.families import MODULES, family_of
from ptf.model.verify import as_json, compare, random_reference, router_arguments, verify
from tests.model.mistakes import MISTAKES, Mistake


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODULES)
def test_family_equals_transformers(model_type: str) -> None:
    report = verify(model_type, configs=12)
    failures = [
        (c.logits, c.gradients, c.worst_gradient, c.diverges, c.problems, c.config)
        for c in report.cases
        if not c.passed
    ]
    assert len(report.cases) == 12
    assert not failures


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.model_type}: {m.name}")
def test_mistake_is_caught(mistake: Mistake) -> None:
    with mistake.made():
        report = verify(mistake.model_type, configs=12, change=mistake.model, until_failure=True)
    assert not report.passed
    case = report.cases[-1]
    assert case.problems or case.diverges or case.gradients > 1e-5


def test_the_place_of_a_mistake_is_named() -> None:
    def change(model) -> None:
        model.layers[1].attn.o_proj.weight.data[0] += 1

    report = verify("llama", configs=1, change=change)
    assert report.cases[0].diverges.startswith("layer 1, attention")
    assert json.loads(as_json(report))["passed"] is False


@pytest.mark.parametrize("fails", [False, True])
def test_outputs_are_recorded_during_the_run_alone(fails) -> None:
    model = torch.nn.Linear(2, 2)

    def run() -> None:
        model(torch.ones(1, 2))
        if fails:
            raise KeyError("in the run")

    recorded = None
    with pytest.raises(KeyError) if fails else nullcontext():
        recorded = verify_module._record(model, {"it": model}, run)
    if recorded is not None:
        model(torch.zeros(1, 2))
        assert [output.tolist() for output in recorded.outputs["it"]] == [model(torch.ones(1, 2)).tolist()]
    assert not model._forward_hooks


def test_what_is_neither_family_nor_directory_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="neither a directory"):
        verify(str(tmp_path))


@pytest.mark.parametrize("swapped", [False, True])
def test_stacked_experts_of_a_published_checkpoint_are_read_and_written(tmp_path: Path, swapped: bool) -> None:
    """Qwen3.5's published checkpoints stack the experts; transformers saves each by itself. As a control, gate and up
    are swapped."""
    config = family_of({"model_type": "qwen3_5_moe"}).random_config(random.Random("stacked"))
    model = random_reference(config, 0)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in whole.items() if ".experts." not in name}
    parts = ("up", "gate") if swapped else ("gate", "up")
    for stem in {name.split("experts.")[0] + "experts." for name in whole if ".experts." in name}:
        count = config["text_config"]["num_experts"]
        both = [torch.cat([whole[f"{stem}{e}.{p}_proj.weight"] for p in parts]) for e in range(count)]
        stored[f"{stem}gate_up_proj"] = torch.stack(both)
        stored[f"{stem}down_proj"] = torch.stack([whole[f"{stem}{e}.down_proj.weight"] for e in range(count)])
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    case = compare(tmp_path, model)
    assert case.problems == ()  # every tensor is written back under its name, byte for byte
    assert case.passed is not swapped


def test_transformers_is_asked_for_what_its_routers_compute():
    config = family_of({"model_type": "qwen3_moe"}).random_config(random.Random(0))
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    ids = torch.tensor([[1, 2, 3]])
    assert hf(input_ids=ids, **router_arguments(4)).router_logits
    assert not hf(input_ids=ids, **router_arguments(0)).router_logits  # negative control
