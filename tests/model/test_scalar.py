"""The config of a classifier that a reward model is written with."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

from ptf.errors import UserError
from ptf.model.head import as_scalar
from tests.model.published_configs import TEXTS

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


@pytest.mark.parametrize("name", TEXTS)
def test_a_model_has_transformers_classifier_or_is_refused(name):
    if name in CLASSIFIERS:
        assert hasattr(transformers, as_scalar({"model_type": name}, 0)["architectures"][0])
    else:
        with pytest.raises(UserError, match=f"transformers has no classifier of {name}"):
            as_scalar({"model_type": name}, 0)


def test_transformers_has_a_classifier_of_every_other_family():
    assert set(TEXTS) - CLASSIFIERS.keys() == {"granite", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe_text"}
