"""Real tokenizers, templates and conversations, where PTF_DATA has them; and a tokenizer of one id a character, everywhere."""

import os
from pathlib import Path

import pytest

from ptf.data.tokenizer import Tokenizer, character_tokenizer

SHARED = Path(os.environ.get("PTF_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(scope="session")
def shared() -> Path:
    if not (SHARED / "templates").is_dir():
        pytest.skip("needs the real data: point PTF_DATA at it")
    return SHARED


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,+-=", tmp_path_factory.mktemp("characters"))
