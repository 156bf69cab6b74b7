"""The response's side: run its code as a module, then serve the requests of the tests, one after the other.

Nothing in this process is trusted. The tests' side accepts plain data as a reply and nothing else; this side never sees
the tests, only the arguments of calls.
"""

import builtins
import contextlib
import operator
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from .plain import ANSWER, ARITHMETIC, builtin_exception, decode, encode, receive, send

OPERATIONS: dict[str, Callable[..., Any]] = {  # what may be asked of an object besides attributes and calls
    **{
        f.__name__: f
        for f in (
            len,
            iter,
            next,
            bool,
            str,
            repr,
            int,
            float,
            abs,
            round,
            reversed,
            format,
            isinstance,
            issubclass,
            hash,
            dir,
        )
    },
    **{name: getattr(operator, name) for name in ("index", "neg", "pos", "invert", "getitem", "setitem", "delitem")},
    **{name: getattr(operator, name) for name in ARITHMETIC},
    "await": lambda coroutine: _awaited(coroutine),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager, error: manager.__exit__(error and type(error), error, None),
}


class Answer:
    """The module of a response, and the objects of it that the tests hold, by number."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.objects, self.numbers = link, list[Any](), dict[int, int]()
        self.module = types.ModuleType(ANSWER)

    def load(self, source: str) -> None:
        """Run the response's source as the module `solution`."""
        sys.modules[ANSWER] = self.module
        sys.argv = [ANSWER]
        exec(compile(source, ANSWER, "exec"), self.module.__dict__)

    def reference(self, thing: Any) -> list:
        """Return what stands for an object that stays here: its number and what kind it is."""
        number = self.numbers.setdefault(id(thing), len(self.objects))
        if number == len(self.objects):
            self.objects.append(thing)  # kept, so that its id stays its own
        if isinstance(thing, type) and issubclass(thing, Exception):
            return ["o", number, "exception", [c.__name__ for c in thing.__mro__]]
        return ["o", number, "coroutine" if isinstance(thing, types.CoroutineType) else "object", []]

    def received(self, data: list) -> Any:
        """Return the value that a form which is no plain data stands for."""
        tag, value, *more = data
        if tag == "o":
            return self.objects[value]
        if tag == "g":
            return getattr(builtins, value)
        if tag == "e":
            return self.exception(value, more[0])
        return lambda *args, **kwargs: self.call_back(value, args, kwargs)  # "k": a function of the tests

    def exception(self, names: list[str], arguments: list) -> BaseException:
        """Return an exception of the first of these names that Python has."""
        return builtin_exception(names)(*[decode(a, self.received) for a in arguments])

    def call_back(self, number: int, args: tuple, kwargs: dict) -> Any:
        """Call a function of the tests and return its result."""
        send(self.link, ["callback", number, *self.encoded([list(args), kwargs])])
        kind, *rest = self.serve(until="called")
        if kind == "raise":
            raise self.exception(*rest)
        return decode(rest[0], self.received)

    def encoded(self, values: list) -> list:
        """Return values in the form in which they are sent."""
        return [encode(v, self.reference) for v in values]

    def serve(self, until: str = "") -> list:
        """Answer requests; the end of the link, or a message that begins with `until`, ends it."""
        while True:
            kind, *rest = receive(self.link)
            if kind == until:
                return rest
            try:
                done = self.done(kind, *rest)
            except BaseException as error:  # SystemExit and KeyboardInterrupt too: the tests are told, and it goes on
                done = ["raise", [c.__name__ for c in type(error).__mro__], _arguments(error, self.encoded)]
            try:
                send(self.link, done)
            except ValueError as error:  # too long
                send(self.link, ["raise", ["ValueError"], [str(error)]])

    def done(self, kind: str, *rest: Any) -> list:
        """Carry out a request and return the reply to it."""
        if kind == "load":
            self.load(rest[0])
            return ["value", None]
        if kind == "names":
            found = {name: self.module.__dict__[name] for name in rest[0] if name in self.module.__dict__}
            # modules that the response imported are not given out: the tests import their own
            return [
                "value",
                [
                    "d",
                    [[k, encode(v, self.reference)] for k, v in found.items() if not isinstance(v, types.ModuleType)],
                ],
            ]
        thing = self.objects[rest[0]]
        if kind == "plain":
            return ["value", encode(thing, _refused, base=True)]
        given = [decode(v, self.received) for values in rest[2:3] for v in values]
        if kind == "get":
            return ["value", encode(getattr(thing, rest[1]), self.reference)]
        if kind == "set":
            setattr(thing, rest[1], *given)
            return ["value", None]
        if kind == "operate":
            return ["value", encode(OPERATIONS[rest[1]](thing, *given), self.reference)]
        named = {k: decode(v, self.received) for k, v in rest[3].items()}
        result = thing(*given, **named)  # "call"
        if result is not None:
            return ["value", encode(result, self.reference)]
        # without a result it may have changed its arguments
        before, after = [*rest[2], *rest[3].values()], self.encoded([*given, *named.values()])
        changed = [
            isinstance(b, list) and b[0] in ("l", "d", "s", "B") and a != b for a, b in zip(after, before, strict=True)
        ]
        return ["value", None, [a if c else None for a, c in zip(after, changed, strict=True)]]


def _refused(value: Any) -> list:
    raise TypeError(f"an object of type {type(value).__name__} is no plain data")


def _awaited(coroutine: types.CoroutineType) -> Any:
    import asyncio  # it takes longer to load than everything else here

    return asyncio.run(coroutine)


def _arguments(error: BaseException, encoded: Callable[[list], list]) -> list:
    try:
        return encoded([a if isinstance(a, bool | int | float | str | tuple | None) else str(a) for a in error.args])
    except BaseException:
        return []


def serve(link: socket.socket) -> None:
    """Serve requests of the tests until the link ends: this is the process's whole life."""
    with contextlib.suppress(EOFError, OSError):
        Answer(link).serve()
