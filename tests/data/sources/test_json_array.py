"""A `.json` file read piece by piece: how long one value may be."""

import io

import pytest

from ptf.data.sources import json_array
from ptf.data.sources.json_array import Scanner
from ptf.errors import UserError


def scanner(text: bytes) -> Scanner:
    """Return a scanner behind the opening bracket of a text."""
    found = Scanner("rows.json", io.BytesIO(text))
    assert found.token() == (b"", b"[")
    return found


@pytest.mark.parametrize(("length", "refused"), [(3900, False), (9000, True)])
def test_an_element_may_have_as_many_bytes_as_the_limit(monkeypatch, length, refused):
    monkeypatch.setattr(json_array, "MAX_ELEMENT_BYTES", 4096)
    monkeypatch.setattr(json_array, "READ", 512)
    text = b'[{"a": "' + b"x" * length + b'"}]'
    for keep in (True, False):
        opened = scanner(text)
        assert opened.token()[1] == b"{"
        if refused:  # a string is one token, whose end is looked for
            with pytest.raises(UserError, match=r"rows\.json:1: a value has no end within 0 MiB"):
                opened.element(keep)
        else:
            assert opened.element(keep) == (text[1:-1] if keep else b"")


def test_the_limit_that_is_named_is_256_mib():
    assert "a value has no end within 256 MiB; write the rows as JSON lines" in str(scanner(b"[")._too_long())
