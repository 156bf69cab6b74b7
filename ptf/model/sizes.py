"""The sizes of the model that a backend makes of a directory."""

from pathlib import Path
from typing import Literal

from ptf.model import bridge, hf_backend
from ptf.model.config import DecoderConfig


def sizes_of(directory: Path, backend: Literal["ptf", "hf"]) -> DecoderConfig:
    """Return the sizes of the model that a backend makes of a directory; weights are not read."""
    if backend == "hf":
        return hf_backend.decoder_config(hf_backend.configured(directory))
    return bridge.decoder_config(directory)
