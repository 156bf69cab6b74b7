"""Python values as JSON and back: the only form in which anything crosses between the response and its tests.

Decoding builds values of Python's own types and nothing else, whatever was sent. An object of any other class stays in
its process, and a number that identifies it is sent instead. Types that JSON does not have are sent as lists of a tag
and the contents.
"""

import base64
import builtins
import importlib
import json
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

ANSWER = "solution"  # the module in which a response's code runs
LONGEST = 16 << 20  # bytes of a message
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
)
SMALL = 1 << 62  # integers below it are JSON's; others are hexadecimal, which Python reads in linear time
# classes of the standard library that are data: (module, name): arguments that make the value again
LIBRARY: dict[tuple[str, str], Callable[[Any], tuple]] = {
    ("fractions", "Fraction"): lambda v: (v.numerator, v.denominator),
    ("decimal", "Decimal"): lambda v: (str(v),),
    ("datetime", "date"): lambda v: (v.year, v.month, v.day),
    ("datetime", "datetime"): lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
    ("datetime", "time"): lambda v: (v.hour, v.minute, v.second, v.microsecond),
    ("datetime", "timedelta"): lambda v: (v.days, v.seconds, v.microseconds),
    ("collections", "deque"): lambda v: (list(v), v.maxlen),
}


class Malformed(Exception):
    """What was received is not a value's form."""


def _tuple(value: tuple, of: Callable[[Any], Any]) -> list:
    kind, items = type(value), [of(v) for v in tuple.__iter__(value)]
    fields = getattr(kind, "_fields", None)
    if isinstance(fields, tuple) and kind.__module__ != "builtins":
        return ["T", kind.__name__, list(fields), items]
    return ["t", items]


ENCODERS: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {  # of subclasses too; `of` encodes what is inside
    int: lambda value, of: of(int.__index__(value)),
    float: lambda value, of: float.__float__(value),
    str: lambda value, of: str.__str__(value),
    bytes: lambda value, of: ["b", base64.b64encode(value).decode()],
    bytearray: lambda value, of: ["B", base64.b64encode(value).decode()],
    tuple: _tuple,
    list: lambda value, of: ["l", [of(v) for v in list.__iter__(value)]],
    set: lambda value, of: ["s", [of(v) for v in value]],
    frozenset: lambda value, of: ["f", [of(v) for v in value]],
    dict: lambda value, of: ["d", [[of(k), of(v)] for k, v in dict.items(value)]],
    range: lambda value, of: ["r", of(value.start), of(value.stop), of(value.step)],
}


def encode(value: Any, other: Callable[[Any], list], base: bool = False) -> Any:
    """Return the value as JSON's types; what is not plain data is what `other` makes of it.

    A subclass that the response defines is not plain, for it may have methods and state of its own, unless `base` asks
    for the data of its built-in base.
    """

    def of(v: Any) -> Any:
        return encode(v, other)

    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else ["i", format(value, "x")]
    if kind.__module__ == ANSWER and not base:
        return other(value)
    if kind is complex:
        return ["c", value.real, value.imag]
    for built_in in kind.__mro__:
        if built_in in ENCODERS:
            return ENCODERS[built_in](value, of)
    if arguments := LIBRARY.get((kind.__module__, kind.__qualname__)):
        return ["L", kind.__module__, kind.__qualname__, [of(v) for v in arguments(value)]]
    return of_numpy(value, other) or other(value)


def of_numpy(value: Any, other: Callable[[Any], list]) -> Any:
    """Return a numpy array or number of a numeric type; None if it is none."""
    numpy = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", ())
    if (
        numpy is None
        or not isinstance(value, (array, getattr(numpy, "generic", ())))
        or value.dtype.kind not in "biufc"
    ):
        return None
    if not isinstance(value, array):
        return encode(value.item(), other)
    return ["n", value.dtype.str, list(value.shape), [encode(v, other) for v in value.ravel().tolist()]]


def decode(data: Any, other: Callable[[list], Any]) -> Any:
    """Return the value; forms that are no plain data are what `other` makes of them. Raise Malformed."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise Malformed(f"{str(data)[:60]} is no value")
    tag, rest = data[0], data[1:]
    try:
        if (make := DECODERS.get(tag)) is None:
            return other(data)
        return make(lambda v: decode(v, other), *rest)
    except (Malformed, RecursionError):
        raise
    except Exception as error:
        raise Malformed(f"{str(data)[:60]} is no value: {type(error).__name__}: {error}") from None


def _named(of: Callable, name: str, fields: list, items: list) -> Any:
    from collections import namedtuple

    return namedtuple(name, fields)(*map(of, items))  # it takes identifiers only


def _library(of: Callable, module: str, name: str, arguments: list) -> Any:
    if (module, name) not in LIBRARY:
        raise Malformed(f"{module}.{name} is no plain data")
    return getattr(importlib.import_module(module), name)(*map(of, arguments))


def _array(of: Callable, dtype: str, shape: list, items: list) -> Any:
    import numpy

    made = numpy.dtype(dtype)
    if made.kind not in "biufc":
        raise Malformed(f"arrays of {dtype} are no plain data")
    return numpy.array([of(v) for v in items], made).reshape([int(n) for n in shape])


DECODERS: dict[str, Callable[..., Any]] = {
    "i": lambda of, digits: int(digits, 16),
    "c": lambda of, real, imaginary: complex(real, imaginary),
    "b": lambda of, text: base64.b64decode(text, validate=True),
    "B": lambda of, text: bytearray(base64.b64decode(text, validate=True)),
    "t": lambda of, items: tuple(map(of, items)),
    "l": lambda of, items: list(map(of, items)),
    "s": lambda of, items: set(map(of, items)),
    "f": lambda of, items: frozenset(map(of, items)),
    "d": lambda of, items: {of(k): of(v) for k, v in items},
    "r": lambda of, *ends: range(*map(of, ends)),
    "T": _named,
    "L": _library,
    "n": _array,
}


def builtin_exception(names: list[str]) -> type[Exception]:
    """Return the first exception of these names that Python has."""
    found = (getattr(builtins, str(name), None) for name in names)
    return next((e for e in found if isinstance(e, type) and issubclass(e, Exception)), Exception)


def send(to: socket.socket, message: Any) -> None:
    """One message. Raises ValueError where it is longer than LONGEST bytes."""
    data = json.dumps(message).encode()
    if len(data) > LONGEST:
        raise ValueError(
            f"a value of {len(data) >> 20} MiB is too large to cross between a response and its tests ({LONGEST >> 20} "
            "MiB)"
        )
    to.sendall(struct.pack("!I", len(data)) + data)


def receive(source: socket.socket) -> Any:
    """Return the next message. Raise EOFError where there is none, Malformed where it is no JSON."""
    (length,) = struct.unpack("!I", _exactly(source, 4))
    if length > LONGEST:
        raise Malformed(f"a message of {length} bytes")
    try:
        return json.loads(_exactly(source, length))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None


def _exactly(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = source.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return bytes(data)
