"""The tests' side of a response: `Link` sends requests to it, and a `Remote` represents an object of the response that
is not plain data: a function, a class, an instance.

Operations on a Remote are computed by the response, but comparisons are not. They are computed here, on plain values;
the response never receives the value that it is compared with, and an object without a plain value equals only itself.
"""

import builtins
import operator
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .plain import ARITHMETIC, Malformed, builtin_exception, decode, encode, receive, send


class AnswerFault(BaseException):
    """The response did what no correct response does.

    It is no subclass of Exception, so that an `except` in the tests does not catch it as a result.
    """


class TestsFault(BaseException):
    """The tests request something that cannot be requested of any response."""


class Link:
    """The connection to one response."""

    def __init__(self, pipe: socket.socket) -> None:
        self.pipe = pipe
        self.asked = 0  # how many values or calls were requested
        self.first: Callable[[], None] = lambda: None  # called before the first of them
        self.fault: str | None = None  # after which nothing of it counts
        self.raised: BaseException | None = None  # the last exception that came from the response
        self.remotes: dict[int, Any] = {}
        self.functions: list[Callable] = []
        self.kinds: dict[str, type[Exception]] = {}  # the response's own classes of exceptions, by name

    def ask(self, kind: str, *rest: Any) -> list:
        """Return the reply after "value".

        Raise what the response raised, as an exception of Python's own or of those in `kinds`.
        """
        if self.fault:
            raise AnswerFault(self.fault)
        if kind not in ("load", "names"):
            self.asked += 1
            if self.asked == 1:
                self.first()
        try:
            send(self.pipe, [kind, *rest])
            while True:
                reply = receive(self.pipe)
                if not isinstance(reply, list) or len(reply) < 2:
                    raise Malformed("that is no reply")
                if reply[0] == "value":
                    return reply[1:]
                if reply[0] == "raise":
                    break
                self._called_back(*reply[1:])
            names, given = reply[1:]
            self.raised = raised = self.exception(names, [decode(a, self.received) for a in given])
        except (Malformed, TypeError, ValueError, KeyError, IndexError, RecursionError, MemoryError) as error:
            self.failed(f"what the response sent cannot be read: {error}")
        except (EOFError, OSError):
            self.failed("the response's process ended")
        raise raised

    def value(self, kind: str, *rest: Any) -> Any:
        """Return the value that the response replies to a request."""
        try:
            return decode(self.ask(kind, *rest)[0], self.received)
        except (Malformed, RecursionError, MemoryError) as error:
            self.failed(f"what the response sent cannot be read: {error}")

    def failed(self, why: str) -> NoReturn:
        """Remember the first fault of the response and raise AnswerFault."""
        self.fault = self.fault or why
        raise AnswerFault(self.fault)

    def received(self, data: list) -> Any:
        """Return the object that stands for one of the response's. Raise Malformed for anything else."""
        tag, number, kind, names = data
        if tag != "o" or type(number) is not int:
            raise Malformed(f"{str(data)[:60]} is no value")
        if number not in self.remotes:
            if kind == "exception":
                self.kinds[names[0]] = self.remotes[number] = type(
                    str(names[0]), (builtin_exception(names),), {"__module__": "solution"}
                )
            else:
                self.remotes[number] = Remote(self, number, kind == "coroutine")
        return self.remotes[number]

    def sent(self, thing: Any) -> list:
        """Return what stands for an argument that is no plain data."""
        if isinstance(thing, Remote):
            return ["o", _number(thing)]
        if getattr(builtins, getattr(thing, "__name__", ""), None) is thing:
            return ["g", thing.__name__]
        if isinstance(thing, type) and self.kinds.get(thing.__name__) is thing:
            return ["o", next(number for number, remote in self.remotes.items() if remote is thing)]
        if callable(thing):
            self.functions.append(thing)
            return ["k", len(self.functions) - 1]
        raise TestsFault(
            f"the tests give the response an object of type {type(thing).__name__}, "
            "which is neither plain data nor a function"
        )

    def exception(self, names: list[str], arguments: list) -> Exception:
        """Return an exception of the response's kind, or of the nearest that Python has."""
        kind = next((self.kinds[name] for name in names if name in self.kinds), None) or builtin_exception(names)
        try:
            return kind(*arguments)
        except Exception:  # some want arguments of certain types
            return next(e for e in kind.__mro__ if e in (ValueError, LookupError, OSError, Exception))(*arguments)

    def _called_back(self, number: int, positional: Any, by_name: Any) -> None:
        args, named = decode(positional, self.received), decode(by_name, self.received)
        try:
            result = ["called", "value", encode(self.functions[number](*args, **named), self.sent)]
        except AssertionError:
            self.failed("an assertion of a function that the tests gave it failed")
        except Exception as error:
            plain = [a if isinstance(a, bool | int | float | str | None) else str(a) for a in error.args]
            result = [
                "called",
                "raise",
                [c.__name__ for c in type(error).__mro__],
                [encode(a, self.sent) for a in plain],
            ]
        send(self.pipe, result)

    def call(self, thing: "Remote", args: tuple, named: dict[str, Any]) -> Any:
        """Call an object of the response and return its result; arguments that it changed are changed here too."""
        given, by_name = [encode(a, self.sent) for a in args], {k: encode(v, self.sent) for k, v in named.items()}
        result, *more = self.ask("call", _number(thing), None, given, by_name)
        try:
            for original, after in zip([*args, *named.values()], more[0] if more else [], strict=False):
                if after is not None:
                    _refill(original, decode(after, self.received))
            return decode(result, self.received)
        except (Malformed, TypeError, ValueError, RecursionError, MemoryError) as error:
            self.failed(f"what the response sent cannot be read: {error}")


def _refill(original: Any, now: Any) -> None:
    """Give an argument the contents that a function without a result left in it."""
    if isinstance(original, list | bytearray) and isinstance(now, list | bytearray):
        original[:] = now
    elif isinstance(original, dict | set) and isinstance(now, type(original).__mro__[-2]):
        original.clear()
        original.update(now)


def _number(thing: "Remote") -> int:
    return object.__getattribute__(thing, "_ptf_number")


def _link(thing: "Remote") -> Link:
    return object.__getattribute__(thing, "_ptf_link")


def _operate(thing: "Remote", name: str, *args: Any) -> Any:
    link = _link(thing)
    return link.value("operate", _number(thing), name, [encode(a, link.sent) for a in args])


def _plain(thing: Any) -> Any:
    """Return the plain value of an instance of a subclass of a plain type; other Remotes have none."""
    if not isinstance(thing, Remote):
        return thing
    link = _link(thing)
    try:
        return link.value("plain", _number(thing))
    except Exception:
        link.failed("the response gave an object of its own where a plain value is compared")


class Remote:
    """An object in the response's process."""

    __slots__ = ("_ptf_coroutine", "_ptf_link", "_ptf_number")

    def __init__(self, link: Link, number: int, coroutine: bool = False) -> None:
        for name, value in (("link", link), ("number", number), ("coroutine", coroutine)):
            object.__setattr__(self, f"_ptf_{name}", value)

    def __getattr__(self, name: str) -> Any:
        return _link(self).value("get", _number(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        link = _link(self)
        link.value("set", _number(self), name, [encode(value, link.sent)])

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the response's object."""
        made = _link(self).call(self, args, named)
        if isinstance(made, Remote) and object.__getattribute__(made, "_ptf_coroutine"):
            return _later(made)
        return made

    def __iter__(self) -> Iterator[Any]:
        return _operate(self, "iter")

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in self)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, Remote) and bool(_operate(thing, "isinstance", self))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, AnswerFault | TestsFault | AssertionError):
            return False  # no manager of the response's keeps back what fails it
        names = [c.__name__ for c in type(error).__mro__]
        link = _link(self)
        return bool(link.value("operate", _number(self), "exit", [["e", names, [str(error)]] if error else None]))

    def __hash__(self) -> int:
        return id(self)


async def _later(coroutine: Remote) -> Any:
    return _operate(coroutine, "await")


def _unary(name: str) -> Callable:
    return lambda self, *args: _operate(self, name, *args)


def _arithmetic(name: str, reflected: bool) -> Callable:
    """Between two of the response's objects it is the response's; with a value of the tests' it is done here, so that
    the response does not see that value."""
    compute = getattr(operator, name)

    def operation(self: Remote, value: Any) -> Any:
        if isinstance(value, Remote):
            return _operate(*((value, name, self) if reflected else (self, name, value)))
        return compute(value, _plain(self)) if reflected else compute(_plain(self), value)

    return operation


def _comparison(name: str) -> Callable:
    compute = getattr(operator, name)

    def operation(self: Remote, value: Any) -> Any:
        if name in ("eq", "ne") and (value is self or value is None):
            return (value is self) == (name == "eq")
        return compute(_plain(self), _plain(value))

    return operation


UNARY = (
    "next",
    "enter",
    "len",
    "bool",
    "str",
    "repr",
    "int",
    "float",
    "index",
    "abs",
    "round",
    "reversed",
    "format",
    "neg",
    "pos",
    "invert",
)
for _name in (*UNARY, "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in ARITHMETIC:
    setattr(Remote, f"__{_name.strip('_')}__", _arithmetic(_name, False))
    setattr(Remote, f"__r{_name.strip('_')}__", _arithmetic(_name, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _comparison(_name))
