"""The config of a classifier that a reward model is written with."""

import pytest

from ptf.errors import UserError
from ptf.model.families import MODULES
from ptf.model.scalar import as_scalar

CONFIG = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "pad_token_id": None}


def test_the_same_model_with_one_output():
    made = as_scalar(CONFIG, 7)
    assert made["architectures"] == ["Qwen3ForSequenceClassification"]
    assert (made["id2label"], made["label2id"]) == ({"0": "score"}, {"score": 0})
    assert made["pad_token_id"] == 7
    assert as_scalar(CONFIG | {"pad_token_id": 0}, 7)["pad_token_id"] == 7


def test_a_multimodal_model_is_refused():
    with pytest.raises(UserError, match="gemma3 is multimodal"):
        as_scalar({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 0)
    with pytest.raises(UserError, match="transformers has no classifier of granite"):
        as_scalar({"model_type": "granite", "architectures": ["GraniteForCausalLM"]}, 0)


def test_transformers_has_a_classifier_of_every_other_family() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as classifiers

    text = {m for m in MODULES if m not in ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe")}
    assert text - classifiers.keys() == {"granite", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe_text"}
