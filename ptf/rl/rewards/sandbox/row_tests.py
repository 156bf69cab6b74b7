"""The tests' side: run the tests of one data row against a response in another process, and return the verdict.

The tests are a program of their own, in which the names that they do not define are the response's. They pass if they
run to their end and have used the response. An error counts as the response's (0) if the response was used before it,
and as the tests' own (no result) otherwise.
"""

import ast
import builtins
import importlib
import json
import re
import socket
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .plain import ANSWER
from .remote import AnswerFault, Link, TestsFault

# modules whose names tests may use without importing them
MODULES = ("math", "collections", "itertools", "functools", "operator", "heapq", "bisect", "re")
LATER = {  # the same for modules that take long to load
    "typing": ("Any", "Dict", "List", "Optional", "Set", "Tuple"),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
    "datetime": ("date", "datetime", "timedelta"),
}
ALIASES = {"np": "numpy", "pd": "pandas"}
JUDGES = re.compile(r"assert|raises|fail|exit|main", re.IGNORECASE)  # functions by which tests may fail


class Unjudged(Exception):
    """These tests can judge no response; the message is the reason."""


def programs(tests: Any, judging: bool = True) -> list[ast.Module]:
    """Return the tests, a string or a list of strings, as programs. Raises Unjudged if they can judge no response."""
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list) or not all(isinstance(t, str) for t in tests):
        raise Unjudged(f"the tests are of type {type(tests).__name__}; they must be a string or a list of strings")
    try:
        trees = [tree for text in tests if (tree := ast.parse(text)).body]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Unjudged(f"the tests are no Python: {error}") from None
    if not trees:
        raise Unjudged("there are no tests")
    if judging and not any(_judges(node) for tree in trees for node in ast.walk(tree)):
        raise Unjudged("the tests assert nothing")
    return trees


def _judges(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return bool(JUDGES.search(ast.unparse(node.func)))
    return isinstance(node, ast.Assert | ast.Raise)


def names_used(trees: Sequence[ast.AST]) -> tuple[set[str], set[str], set[str]]:
    """Return the names that the tests load and do not bind, those of them that are used only for their attributes, and
    the attributes."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = {node.attr: node for node in nodes if isinstance(node, ast.Attribute)}.keys()
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    loaded = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(
            node,
            ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar,
        ):
            bound.add(node.name or "")
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != ANSWER):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    of_owners = set(map(id, owners))
    alone = {node.id for node in loaded if id(node) not in of_owners}
    names = {node.id for node in loaded if not node.id.startswith("__")}
    return names - bound, names & {node.id for node in owners} - alone - bound, set(attributes)


def wanted(trees: Sequence[ast.AST], entry: str | None) -> tuple[set[str], dict[str, Any]]:
    """Return the names that the response must define, and the names that are Python's.

    A name that Python has too (`sum`, `isclose`) is the response's only if it is the `entry`, or the only name that the
    tests use; otherwise a response could replace `set` and so decide its own tests. Raises Unjudged if the tests use no
    name that a response could define, or several of Python's own and there is no `entry`.
    """
    loaded, owners, _ = names_used(trees)
    ours = {
        name: importlib.import_module(ALIASES.get(name, name))
        for name in owners
        if name in sys.stdlib_module_names or name in ALIASES
    }
    exceptions = {
        name for name, thing in vars(builtins).items() if isinstance(thing, type) and issubclass(thing, BaseException)
    }
    free = loaded - ours.keys() - exceptions - {entry}
    modules = [
        *map(importlib.import_module, MODULES),
        *(importlib.import_module(module) for module, names in LATER.items() if free & set(names)),
    ]
    library = {name: getattr(module, name) for module in reversed(modules) for name in free if hasattr(module, name)}
    own = [
        free - library.keys() - vars(builtins).keys(),
        (free & library.keys()) - vars(builtins).keys(),
        free & vars(builtins).keys(),
    ]
    if entry is not None or own[0] or imports_of_answer(trees)[0]:
        return own[0] | ({entry} if entry else set()), ours | {name: library[name] for name in own[1]}
    either = own[1] or own[2]
    if len(either) == 1:
        return either, ours
    if not either:
        raise Unjudged("the tests use no name that a response could define")
    raise Unjudged(
        f"the tests use no names but Python's own ({', '.join(sorted(either))}): say with `entry` which is the "
        "response's"
    )


def imports_of_answer(trees: Sequence[ast.AST]) -> tuple[bool, set[str]]:
    """Return whether a program imports the module `solution`, and the names that it imports from it."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == ANSWER]
    whole = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names if alias.name == ANSWER]
    return bool(named or whole), {alias.name for node in named for alias in node.names}


def run_tests(link: Link, job: dict[str, Any], reached: Callable[[str], None]) -> dict[str, Any]:
    """Return {"value": 1.0 or 0.0, "why": reason}, or {"none": reason} if there is no result.

    `reached` is called with the side that runs next, "answer" or "tests".
    """
    try:
        trees = [*programs(job["setup"] or "pass", judging=False), *programs(job["tests"])]
        names, ours = wanted(trees, job["entry"])
        codes = [compile(tree, f"<tests {i}>", "exec") for i, tree in enumerate(trees)]
    except (Unjudged, SyntaxError, ImportError) as error:
        return {"none": str(error)}
    reached("answer")
    try:
        link.ask("load", job["answer"])
        asked = names | names_used(trees)[2] | imports_of_answer(trees)[1]
        every: dict[str, Any] = link.value("names", sorted(asked))
        if not isinstance(every, dict):
            link.failed("its names cannot be read")
    except (AnswerFault, Exception) as error:
        return {"value": 0.0, "why": f"the response does not run: {type(error).__name__}: {error}"[:300]}
    reached("tests")
    link.first = partial(reached, "answer")
    return run(codes, link, {k: v for k, v in every.items() if k in names}, every, ours, job["entry"])


def run(
    codes: list, link: Link, named: dict[str, Any], every: dict[str, Any], ours: dict[str, Any], entry: str | None
) -> dict[str, Any]:
    """Run the tests and return their verdict.

    `named` are the response's names that the tests use, and `every` are those that they can import from the module
    `solution`.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    solution = sys.modules[ANSWER] = types.ModuleType(ANSWER)
    solution.__dict__.update(every)
    main.__dict__.update(ours | named)
    sys.argv = ["tests"]
    error: BaseException | None = None
    try:
        for code in codes:
            exec(code, main.__dict__)
        call_test_functions(main, named, entry)
    except SystemExit as left:
        error = left if left.code else None  # unittest.main ends so
    except BaseException as raised:
        error = raised
    asked = link.asked or any(not callable(value) for value in named.values())
    if link.fault:
        return {"value": 0.0, "why": link.fault}
    if isinstance(error, TestsFault) or (
        isinstance(error, ImportError) and error is not link.raised and error.name != ANSWER
    ):
        return {"none": f"the tests cannot be run: {error}"}
    if error is None:
        return {"value": 1.0, "why": ""} if asked else {"none": "the tests ask the response for nothing"}
    why = f"{type(error).__name__}: {error}"[:300]
    missing = isinstance(error, NameError | ImportError) or (
        isinstance(error, AttributeError) and error.obj is solution
    )
    return (
        {"value": 0.0, "why": why}
        if asked or missing
        else {"none": f"the tests failed before they asked the response for anything: {why}"}
    )


def call_test_functions(main: types.ModuleType, named: dict[str, Any], entry: str | None) -> None:
    """Call pytest's `test_…` functions, and HumanEval's `check(candidate)`."""
    check = main.__dict__.get("check")
    if entry is not None and isinstance(check, types.FunctionType) and check.__code__.co_argcount == 1:
        if entry not in named:
            raise NameError(f"name {entry!r} is not defined")
        check(named[entry])
    for name, function in list(main.__dict__.items()):
        if name.startswith("test") and isinstance(function, types.FunctionType) and not function.__code__.co_argcount:
            function()


def serve(control: socket.socket, pipe: socket.socket) -> None:
    """Serve one judgement, after which the process ends.

    It reads a job from `control`. It writes a line with the side that runs next whenever that changes, and then a line
    with the verdict.
    """
    with control.makefile("rwb") as lines:
        job = json.loads(lines.readline())

        def say(thing: Any) -> None:
            lines.write(json.dumps(thing).encode() + b"\n")
            lines.flush()

        try:
            verdict = run_tests(Link(pipe), job, say)
        except BaseException as error:
            verdict = {"none": f"the tests cannot be run: {type(error).__name__}: {error}"}
        say(verdict)
