"""What a config.json leaves out is read as transformers reads it."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoConfig

from ptf.errors import UserError
from ptf.model.families import MODULES, family_of

NEEDED = {  # sizes, which have no value that one could mean
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
}


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with all settings that transformers adds."""
    return type(AutoConfig.for_model(config["model_type"])).from_dict(dict(config)).to_dict()


@pytest.mark.parametrize("model_type", MODULES)
def test_a_setting_that_is_left_out_has_transformers_default(model_type):
    family, whole = family_of({"model_type": model_type}), filled({"model_type": model_type})
    text, read = whole.get("text_config"), []
    for key in (text or whole).keys() - {"model_type"}:
        rest = {name: value for name, value in (text or whole).items() if name != key}
        given = {**whole, "text_config": rest} if text else rest
        try:
            found = family.config(given)
        except (KeyError, UserError):  # it may not be left out
            continue
        read.append(key)
        assert found == family.config(filled(given)), key
    assert {"rms_norm_eps", "max_position_embeddings", "num_key_value_heads"} & (text or whole).keys() <= {*read}
    needed = (text or whole).keys() - {*read, "model_type"}
    assert needed <= NEEDED


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "qwen3"])
def test_gemma_multiplies_embeddings_by_the_root_of_their_width(model_type):
    config = filled({"model_type": model_type, "hidden_size": 256})
    found = family_of(config).config(config).embed_scale
    assert found == (16.0 if model_type.startswith("gemma") else 1.0)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_window_without_a_size_has_transformers_size(model_type):
    config = filled({"model_type": model_type, "use_sliding_window": True})
    windows = {layer.window for layer in family_of(config).config({**config, "sliding_window": 4096}).layers}
    del config["sliding_window"]
    assert {layer.window for layer in family_of(config).config(config).layers} == windows == {None, 4096}
