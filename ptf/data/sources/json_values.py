"""Values of files as JSON has them: objects, lists, text, numbers, booleans and null.

Arrow stores more types. What a template prints or a reward reads must not depend on the format that a row was written
in, so each of them becomes what `datasets` gives back, and what JSON lines would hold.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from ptf.errors import UserError

MAX_DEPTH = 200  # objects and lists nested inside each other
NESTED = f"more than {MAX_DEPTH} objects and lists inside each other"


class JsonObject(dict[str, Any]):
    """An object that a columnar file holds as JSON text: its nulls are its own, not those of other rows' keys."""


def parsed(text: str | bytes, object_type: type[dict] | None = None) -> Any:
    """Return the value of JSON text. Raises UserError where it is not JSON, or nested too deeply."""
    try:
        value = json.loads(text, object_hook=object_type)
    except ValueError as e:  # invalid JSON or invalid UTF-8
        raise UserError(f"not JSON: {e}") from None
    except RecursionError:
        raise UserError(NESTED) from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    # another thread may have a smaller stack, so a value that this one parses could exhaust it there
    many = sum(map(text.count, brackets)) > MAX_DEPTH  # type: ignore[arg-type]
    if many and any(isinstance(v, dict | list) for v in next(islice(levels(value), MAX_DEPTH, None), ())):
        raise UserError(NESTED)
    return value


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values inside of no object or list, then the keys and values inside of one, of two, and so on."""
    level = [value]
    while level:
        yield level
        inside = ((*v, *v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = list(chain.from_iterable(inside))


@lru_cache(maxsize=4096)
def is_plain(kind: pa.DataType) -> bool:
    """Return whether the Python values of an Arrow type are values of JSON already, or bytes."""
    if isinstance(kind, pa.JsonType | pa.UuidType):
        return False
    if isinstance(kind, pa.BaseExtensionType):
        return is_plain(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return is_plain(kind.value_type)
    if pa.types.is_map(kind) or pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        return False
    return pa.types.is_union(kind) or all(is_plain(kind.field(i).type) for i in range(kind.num_fields))


def json_value(value: Any, kind: pa.DataType) -> Any:
    """Return a Python value of an Arrow type as JSON has it.

    JSON is parsed, maps become objects, a dictionary's value stands for itself; decimals, uuids, and spans of time
    become text, dates and times ISO text. Bytes stay bytes. Raises UserError for JSON that cannot be parsed.
    """
    if value is None or is_plain(kind):
        return value
    if isinstance(kind, pa.JsonType):
        return parsed(value, JsonObject)
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        return json_value(value, kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return json_value(value, kind.value_type)
    if pa.types.is_map(kind):
        if any(isinstance(k, bytes) for k, _ in value):
            raise UserError("a map has keys that are bytes, not text")
        return {str(json_value(k, kind.key_type)): json_value(v, kind.item_type) for k, v in value}
    if pa.types.is_struct(kind):
        return {field.name: json_value(value[field.name], field.type) for field in kind}
    if pa.types.is_nested(kind):
        return [json_value(v, kind.value_type) for v in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
