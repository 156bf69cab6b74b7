"""One value per position, which reward models and critics compute from the hidden states.

The head is a projection to one row, which transformers' `...ForSequenceClassification` calls `score.weight` [1, D] and
reads at the last token. The product is taken in fp32, because the margin between two scores is smaller than the scores
are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ptf.errors import UserError

HF_NAME = "score.weight"
CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A head with one output."""

    weight: Tensor  # [1, D]

    def values(self, x: Tensor) -> Tensor:
        """Return the value of each position, [..., D] → fp32 [...]. It is no view: FSDP warns of outputs that are."""
        return (x.float() @ self.weight.float().t()).squeeze(-1).clone()


def is_scalar(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a checkpoint with a scalar head.

    Raise UserError for a classifier of several classes.
    """
    scalar = any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())
    classes = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if scalar and classes != 1:
        raise UserError(
            f"model.path: the checkpoint classifies into {classes} classes; a scalar head needs num_labels 1"
        )
    return scalar


def as_scalar(config: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """Return the config.json of the same model as a classifier with one output.

    transformers reads the score at the last token that is not `pad_id`. Raise UserError for a model of which
    transformers has no classifier with these names.
    """
    if "text_config" in config:
        raise UserError(
            f"{config['model_type']} is multimodal, and with a scalar head it cannot be written as a transformers "
            "checkpoint; use its text model"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    if config["model_type"] not in CLASSES:
        raise UserError(
            f"transformers has no classifier of {config['model_type']}, so with a scalar head it cannot be written as "
            "a transformers checkpoint; use another model"
        )
    labels = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    return {**config, "architectures": [CLASSES[config["model_type"]]], **labels, "pad_token_id": pad_id}
