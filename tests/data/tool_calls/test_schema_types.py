"""Values by the types of schemas."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.tool_calls.schema_types import json_arguments, of_text, properties_of, text_arguments, types_of
from tests.data.tool_calls.tables import tool


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, {"string"}),
        ({"type": 5}, {"string"}),
        ({"type": "Float"}, {"number"}),
        ({"type": ["int", "null"]}, {"integer", "null"}),
        (
            {"enum": ["a", 1, 1.5, True, None, [], {}]},
            {"string", "integer", "number", "boolean", "null", "array", "object"},
        ),
        ({"anyOf": [{"type": "array"}, {"oneOf": [{"type": "bool"}]}, {}]}, {"array", "boolean", "string"}),
    ],
)
def test_types(schema, types):
    assert types_of(schema) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        (" 5 ", {"integer"}, 5),
        ("5", {"integer", "string"}, 5),
        ("5.0", {"number"}, 5),
        ("5.5", {"number"}, 5.5),
        ("5.5", {"integer"}, 5.5),
        ("12345678901234567890", {"number"}, 12345678901234567890),
        ("nan", {"number"}, "nan"),
        ("1e999", {"number"}, "1e999"),
        ("five", {"integer"}, "five"),
        ("Null", {"null", "string"}, None),
        ("null", {"string"}, "null"),
        ("True", {"boolean"}, True),
        ("0", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("[NaN]", {"array"}, "[NaN]"),
        ("9" * 5_000, {"integer"}, "9" * 5_000),  # Python reads no more than 4,300 digits
    ],
)
def test_value_of_a_text(text, types, value):
    found = of_text(text, types)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tools",
    [None, [], [tool("g")], [{"name": "f"}], [{"function": {"name": "f", "parameters": None}}], [tool("f", n=True)]],
)
def test_without_a_schema_a_text_remains_a_text(tools):
    assert json.loads(text_arguments({"n": "5"}, tools, "f")) == {"n": "5"}
    assert json.loads(text_arguments({"n": "5"}, [tool("f", n={"type": "integer"})], "f")) == {"n": 5}  # the control


def test_what_is_too_deep_remains_a_text():
    tools = [tool("f", n={"type": "array"})]
    for depth in range(1, 1_200, 7):
        value = "[" * depth + "]" * depth
        found = json.loads(text_arguments({"n": value}, tools, "f"))["n"]
        assert isinstance(found, list) == (depth < 900) or 900 <= depth < 1_000
        assert isinstance(found, list) or found == value


def test_the_form_of_a_response_has_no_function_object():
    assert properties_of([{"type": "function", "name": "f", "parameters": {"properties": {"n": {}}}}], "f") == {"n": {}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
SCHEMA_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@settings(max_examples=50)
@given(JSON)
def test_a_value_that_fits_its_schema_is_not_changed(value):
    for schema in ({}, {"enum": [value]}, {"type": SCHEMA_OF.get(type(value), "null")}):
        text = json.dumps({"a": value})
        assert json_arguments({"a": value}, text, [tool("f", a=schema)], "f") == text


@pytest.mark.parametrize(
    ("value", "schema", "fitted"),
    [
        ("5", {"type": "integer"}, 5),
        (5, {"type": "string"}, "5"),
        (1, {"type": "boolean"}, True),
        (None, {"type": "string"}, None),
        (["1", 2], {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"a": "1"}, {"type": "object", "properties": {"a": {"type": "number"}}}, {"a": 1}),
        ("[1]", {"type": "array"}, [1]),
    ],
)
def test_a_value_that_does_not_fit_is_converted(value, schema, fitted):
    assert json.loads(json_arguments({"a": value}, json.dumps({"a": value}), [tool("f", a=schema)], "f")) == {
        "a": fitted
    }
