"""What tests of the endpoint share."""

import pytest

from ptf.data.tokenizer import Tokenizer
from tests.data.templates import templated


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return templated("plain")
