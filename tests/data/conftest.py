"""A tokenizer of one id a character."""

import pytest

from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,+-=", tmp_path_factory.mktemp("characters"))
