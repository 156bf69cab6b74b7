"""Strict JSON in a model's text: NaN, infinities and numbers beyond a float are refused; no client reads them."""

import json
import math
import re
from typing import Any

MALFORMED = (ValueError, RecursionError)  # what reading and writing raise: bad text, too many digits, too deep


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a number")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_VISIBLE = re.compile(r"\S")
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)


def read(text: str) -> Any:
    """Return the value of a JSON text. Raises one of MALFORMED."""
    return _DECODER.decode(text)


def read_first(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and the position after it. Raises one of MALFORMED."""
    return _DECODER.raw_decode(text, start)


def after(text: str, start: int) -> int:
    """Return the position after the JSON value at `start` or after white space; `start` where none is whole."""
    try:
        begin = _VISIBLE.search(text, start)
        return read_first(text, begin.start() if begin else start)[1]
    except MALFORMED:
        return start


def write(value: Any) -> str:
    """Return the JSON text of a value, in the form that models are trained on: spaces after `:` and `,`, no escapes.

    Halves of surrogate pairs, which no encoding takes, remain escaped. Raises one of MALFORMED, or TypeError for keys
    that JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """Return whether the text can be sent: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
