"""Texts of columns that become numbers."""

import pytest

from ptf.data.messages import as_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        (" TRUE ", True),
        ("false", False),
        ("-7", -7),
        ("1e3", 1000.0),
        ("x", "x"),
        ("9" * 19, int("9" * 19)),  # exact, where a float is not
        ("9" * 20, 1e20),  # not an integer without bounds
    ],
)
def test_a_text_is_read_as_the_number_that_it_holds(text, value):
    found = as_number(text)
    assert (found, type(found)) == (value, type(value))
