"""Mistral 3 (`Mistral3ForConditionalGeneration`: Mistral Small 3.1 and 3.2, Ministral 3): the text model of Mistral or
Ministral 3 behind a vision tower. The language model trains; the vision tensors are copied to the export unchanged."""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.config import DecoderConfig
from ptf.model.families import DENSE, WRAPPER_ALIASES, Family, ministral3, mistral, raise_if_unsupported

TEXT = {"mistral": mistral, "ministral3": ministral3}


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map the text part of a multimodal config.json."""
    text = {"model_type": "mistral", **c["text_config"]}
    raise_if_unsupported("mistral3", {"text_config.model_type": (kind := text["model_type"]) not in TEXT and kind})
    # Mistral Small 3.1 says nothing (from memory of its config.json), and has a head of its own
    tied = c.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return TEXT[kind].config({**text, "tie_word_embeddings": tied})


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json of a multimodal model for the verifier."""
    text = TEXT[r.choice([*TEXT])].random_config(r)
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 8,
    }
    return {
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "multimodal_projector_bias": r.random() < 0.5,
    }


FAMILIES = {
    "mistral3": Family(
        "mistral3",
        config,
        DENSE,
        random_config,
        prefix="language_model.",
        aliases=WRAPPER_ALIASES,
        carried=("vision_tower.", "multi_modal_projector."),
    )
}
