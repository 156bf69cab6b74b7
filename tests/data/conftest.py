"""Tokenizers of one id a character."""

import pytest

from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.tokenizer import Tokenizer
from tests.data import read_form


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,+-=", tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def printable(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_form.tokenizer(tmp_path_factory.mktemp("printable"))
