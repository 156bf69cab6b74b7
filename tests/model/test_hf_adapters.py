"""Where adapters of transformers' modules may be."""

from types import SimpleNamespace

import pytest

from ptf.model.hf_adapters import _refused_by_peft


@pytest.mark.parametrize(
    ("model_type", "path", "refused"),
    [
        ("mamba", "backbone.layers.0.mixer.out_proj", True),
        ("mamba", "backbone.layers.0.mixer.in_proj", False),
        ("llama", "model.layers.0.self_attn.out_proj", False),
    ],
)
def test_peft_takes_no_adapter_of_a_state_space_models_output(model_type, path, refused):
    model = SimpleNamespace(text_config=SimpleNamespace(model_type=model_type))
    assert _refused_by_peft(model, path) == refused
