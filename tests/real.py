"""Where the pretrained models of `make models` are, for tests marked `real` (`make test-real`)."""

import os
from pathlib import Path

import pytest

MODELS = Path(os.environ.get("PTF_MODELS") or Path(__file__).parents[1] / "data" / "models")


def model(name: str) -> Path:
    """The directory of a model; the test is skipped where it is not."""
    if not (MODELS / name / "config.json").is_file():
        pytest.skip(f"needs the pretrained model {name}: `make models`, or point PTF_MODELS at it")
    return MODELS / name
