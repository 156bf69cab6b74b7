"""Values of arguments by the types of a tool's JSON schema.

Formats that write values as plain text (`text_arguments`) cannot tell 5 from "5" without the schema. In formats that
write JSON (`json_arguments`), models still write "5" where the schema wants a number; what fits its schema is kept.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.data.tool_calls import json_text

ALIASES = {  # types that people write in schemas, which JSON schema does not have
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("list", "arr", "sequence"), "array"),
    "bool": "boolean",
    "dict": "object",
}
TYPES_OF_VALUES = {  # in order: a bool is an int
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def properties_of(tools: Sequence[Mapping[str, Any]] | None, name: str) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by their names; empty for an unknown tool."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def text_arguments(values: Mapping[str, str], tools: Sequence[Mapping[str, Any]] | None, name: str) -> str:
    """Return the JSON text of arguments that were written as plain text; one without a schema remains a text."""
    properties = properties_of(tools, name)
    typed = {
        key: of_text(value, types_of(properties[key])) if isinstance(properties.get(key), Mapping) else value
        for key, value in values.items()
    }
    try:
        return json_text.write(typed)
    except json_text.MALFORMED:  # deeper than what can be written
        return json_text.write(dict(values))


def json_arguments(value: Any, text: str, tools: Sequence[Mapping[str, Any]] | None, name: str) -> str:
    """Return `text`, the JSON of arguments, unless their schemas change a value; then the JSON of the new ones."""
    fitted = _fit(value, {"properties": properties_of(tools, name)})
    same = json.dumps(fitted) == json.dumps(value)
    return text if same and json_text.is_encodable(text) else json_text.write(fitted)


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of the types that a schema allows; `string` where it names none."""
    named = schema.get("type")
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        types |= {_type_of(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            types |= {
                name for choice in schema[key] for name in types_of(choice if isinstance(choice, Mapping) else {})
            }
    return {ALIASES.get(name.strip().lower(), name.strip().lower()) for name in types} or {"string"}


def _type_of(value: Any) -> str:
    return next(name for kind, name in TYPES_OF_VALUES.items() if isinstance(value, kind))


def of_text(text: str, types: set[str]) -> Any:
    """Return the value of a text: of the narrowest of the types that it can have, or as JSON, or the text itself."""
    if "null" in types and text.lower() == "null":
        return None
    for kind in ("integer", "number"):
        if kind in types and (number := _number(text, kind)) is not None:
            return number
    if "boolean" in types and text.lower().strip() in ("true", "1", "false", "0"):
        return text.lower().strip() in ("true", "1")
    if not types & {"object", "array"} and "string" in types:
        return text
    try:
        return json_text.read(text)
    except json_text.MALFORMED:
        return text


def _number(text: str, kind: str) -> int | float | None:
    """Return the number that a text is, without loss of digits; None where it is none of that type."""
    try:
        return int(text)
    except ValueError:
        if kind == "integer":
            return None
    try:
        value = float(text)
        return int(value) if value == int(value) else value
    except (ValueError, OverflowError):  # OverflowError: an infinity
        return None


def _fit(value: Any, schema: Any) -> Any:
    """Return a JSON value with what does not fit its schema converted where it can be."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, dict):
        properties = schema.get("properties")
        return {k: _fit(v, properties.get(k)) for k, v in value.items()} if isinstance(properties, Mapping) else value
    if isinstance(value, list):
        return [_fit(item, schema.get("items")) for item in value]
    types = types_of(schema)
    untyped = not schema.keys() & {"type", "enum", "anyOf", "oneOf", "allOf"}
    own = _type_of(value)
    if untyped or value is None or own in types or (own == "integer" and "number" in types):
        return value
    return of_text(value if isinstance(value, str) else json.dumps(value), types)
