"""A published config.json becomes a model of the published size, with its particulars."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.components import standard_shapes
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.families import family_of
from tests.model.published_configs import PUBLISHED, TEXTS, YARN


def mapped(name: str) -> DecoderConfig:
    config, _ = PUBLISHED[name]
    return family_of(config).config(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_size(name: str) -> None:
    c = mapped(name)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(c).named_parameters()}
    padding = (c.padded - c.vocab) * c.dim * (1 if c.tied else 2)
    assert (sum(s.numel() for s in shapes.values()) - padding) / 1e9 == pytest.approx(PUBLISHED[name][1], rel=2e-3)


@pytest.mark.parametrize("model_type", TEXTS)
def test_a_default_shape_has_the_parameters_of_transformers_model(model_type: str, tmp_path: Path) -> None:
    """Which is a published one. Counted without memory, and every tensor of it has a name of the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model(model_type)
    hf.save_pretrained(tmp_path)
    with torch.device("meta"):
        named = [*(reference := AutoModelForCausalLM.from_config(hf)).named_parameters(), *reference.named_buffers()]
    # the bias of a choice of experts is a buffer there
    theirs = sum(
        t.numel() for name, t in named if isinstance(t, torch.nn.Parameter) or name.endswith("correction_bias")
    )
    model = bridge.build(tmp_path)
    c = model.config
    padding = (c.padded - c.vocab) * c.dim * (1 if c.tied else 2)
    assert sum(s.numel() for s in standard_shapes(model).values()) - padding == theirs
    if model_type in ("gpt_oss", "phi3"):  # several of our parameters are one tensor there
        assert {name for name, t in named if isinstance(t, torch.nn.Parameter)} == model.hf_names()
    else:
        assert len(model.hf_names()) >= len(dict(model.named_parameters()))


def test_only_the_whole_layers_of_olmo3_scale_their_frequencies() -> None:
    layers = mapped("Olmo-3-7B").layers
    assert [kind.window for kind in layers[:5]] == [4096, 4096, 4096, None, 4096]
    assert [kind.rope.kind for kind in layers[:5]] == ["default", "default", "default", "yarn", "default"]
    assert layers[3].rope.scale == YARN["attention_factor"]
    assert {kind.rope.theta for kind in layers} == {500_000.0}


def test_every_fourth_layer_of_smollm3_has_no_positions() -> None:
    assert [kind.rope.partial for kind in mapped("SmolLM3-3B").layers[:5]] == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_exaone_has_positions_where_there_are_windows_or_none_is_set() -> None:
    large, small = mapped("EXAONE-4.0-32B").layers, mapped("EXAONE-4.0-1.2B").layers
    assert [(kind.window, kind.rope.partial) for kind in large[2:5]] == [(4096, 1.0), (None, 0.0), (4096, 1.0)]
    assert {(kind.window, kind.rope.partial) for kind in small} == {(None, 1.0)}
    assert {kind.rope.kind for kind in (*large, *small)} == {"llama3"}


def test_mistral_small_has_a_head_of_its_own_though_its_config_does_not_say_so() -> None:
    assert not mapped("Mistral-Small-3.1-24B").tied


LONGROPE = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PUBLISHED["Phi-3-mini-4k"][0] | {"rope_scaling": {"type": "longrope", **LONGROPE}}, "rope_type: longrope"),
        (PUBLISHED["Phi-3-mini-4k"][0] | {"rope_scaling": {"type": "su", **LONGROPE}}, "rope_type: su"),
        (PUBLISHED["Phi-3-mini-4k"][0] | {"rope_scaling": {"type": "yarn"}}, "rope_type: yarn"),
        (PUBLISHED["OLMo-2-1124-7B"][0] | {"hidden_act": "gelu"}, "hidden_act: gelu"),
        (PUBLISHED["OLMo-2-1124-7B"][0] | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        (PUBLISHED["gemma-2-2b"][0] | {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        (PUBLISHED["Mistral-Small-3.1-24B"][0] | {"text_config": {"model_type": "qwen2"}}, "model_type: qwen2"),
        (PUBLISHED["EXAONE-4.0-32B"][0] | {"layer_types": None}, "sliding_window_pattern: 'LLLG' without layer_types"),
        (PUBLISHED["EXAONE-4.0-32B"][0] | {"sliding_window": None}, "sliding_window: null without layer_types"),
        (PUBLISHED["EXAONE-4.0-32B"][0] | {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ({"model_type": "gemma4_text"}, "'gemma4_text' is not supported"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        family_of(config).config(config)
