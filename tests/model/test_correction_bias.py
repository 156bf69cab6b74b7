"""The bias of the choice of experts keeps its values in fp32 wherever a model goes, and the layers that predict further
tokens come through unchanged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ptf.compute.world import World
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.errors import UserError
from ptf.model import model_writer
from ptf.rl.engines.native import NativeEngine
from ptf.rl.roles import Learner
from ptf.train.optim import groups
from ptf.train.trainer import load_model
from tests.model.published import predicting_checkpoint
from tests.tiny import configured

BIAS = "e_score_correction_bias"


def loaded(directory: Path, **more):
    return load_model(directory, World(), ModelConfig(path=str(directory), **more), seed=0, precision="fp32")


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
def test_an_export_is_the_checkpoint_with_its_dtypes(tmp_path, model_type) -> None:
    whole = predicting_checkpoint(tmp_path / "in", model_type)
    model = loaded(tmp_path / "in")
    carried = model.carried(tmp_path / "in")
    model_writer.save_hf(model.hf_tensors(), tmp_path / "in", tmp_path / "out", writes=True, carried=carried)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == whole.keys()
    assert all(back[n].dtype == whole[n].dtype and torch.equal(back[n], whole[n]) for n in whole)
    biases = [n for n in whole if n.endswith(BIAS)]
    assert not all(torch.equal(whole[n], whole[n].bfloat16().float()) for n in biases), "negative control: bf16 rounds"


def test_a_layer_that_config_json_does_not_count_is_refused(tmp_path) -> None:
    predicting_checkpoint(tmp_path, "glm4_moe")
    configured(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(UserError, match=r"unexpected: model.layers.*eh_proj"):
        loaded(tmp_path)


def test_an_engine_in_bf16_holds_it_in_fp32(tmp_path) -> None:
    whole = predicting_checkpoint(tmp_path, "deepseek_v3")
    engine = NativeEngine(str(tmp_path), device=torch.device("cpu"), dtype=torch.bfloat16, version=0)
    held = dict(engine.model.hf_tensors())
    for name in whole.keys() & held.keys():
        assert torch.equal(held[name], whole[name]), name
        assert held[name].dtype == (torch.float32 if name.endswith(BIAS) else torch.bfloat16)


@pytest.mark.parametrize(
    "more", [{}, {"lora": LoraConfig(rank=2)}, {"trainable": ["layers.*"]}], ids=["full", "lora", "patterns"]
)
def test_nothing_trains_it(tmp_path, more) -> None:
    predicting_checkpoint(tmp_path, "glm4_moe")
    model = loaded(tmp_path, **more)
    biases = [p for n, p in model.named_parameters() if n.endswith("correction_bias")]
    assert biases
    trained = {id(p) for group in groups(model, 0.1, {}) for p in group["params"]}
    assert trained
    assert trained.isdisjoint(map(id, biases))


def test_a_pattern_for_it_alone_is_refused(tmp_path) -> None:
    predicting_checkpoint(tmp_path, "glm4_moe")
    with pytest.raises(UserError, match="correction_bias matches nothing"):
        loaded(tmp_path, trainable=["layers.*.moe.correction_bias"])


def test_a_sync_in_bf16_rounds_all_but_it(tmp_path) -> None:
    whole = predicting_checkpoint(tmp_path, "glm4_moe")
    model = loaded(tmp_path)
    train = SimpleNamespace(precision="bf16")
    policy: Any = SimpleNamespace(model=model, settings=SimpleNamespace(train=train))
    sent = dict(Learner._sent_tensors(policy))
    assert all(torch.equal(sent[n], whole[n]) and sent[n].dtype == whole[n].dtype for n in sent)
