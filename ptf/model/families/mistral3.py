"""Mistral 3 (`Mistral3ForConditionalGeneration`: Mistral Small 3.1 and 3.2, Ministral 3): the text model of Mistral or
Ministral 3 behind a vision tower. The language model trains; the vision tensors are copied to the export unchanged."""

import random
from collections.abc import Mapping
from typing import Any

from ptf.model.config import DecoderConfig
from ptf.model.families import Family, ministral3, mistral
from ptf.model.families.members import random_wrapper
from ptf.model.families.names import DENSE, WRAPPER
from ptf.model.families.settings import raise_if_unsupported, text_part

TEXT = {"mistral": mistral, "ministral3": ministral3}


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map the text part of a multimodal config.json."""
    # Mistral Small 3.1 says nothing of its head (from memory of its config.json), and has one of its own
    text = {"model_type": "mistral", **text_part(c)}
    raise_if_unsupported(c, {"text_config.model_type": (kind := text["model_type"]) not in TEXT and kind})
    return TEXT[kind].config(text)


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json of a multimodal model for the verifier."""
    text = TEXT[r.choice([*TEXT])].random_config(r)
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "image_size": 16}
    whole = random_wrapper("mistral3", text, {"model_type": "pixtral", **vision})
    return whole | {"multimodal_projector_bias": r.random() < 0.5}


FAMILIES = {"mistral3": Family("mistral3", config, DENSE, random_config, **WRAPPER)}
