"""YAML files as one tree of nodes that have their place in the text: reading, `extends`, merging and overrides
`a.b=value`. This file does not depend on the schema.

Every value keeps its `SourceLocation` (file:line, or the override that it comes from) through all merges, so later
errors can name the line to change. Nothing here raises: problems are collected in the tree, and the loader reports all
of them at once.

The dialect is the core schema of YAML 1.2: `1e-4` is a number, only true and false are booleans, a date is text, keys
are always text, and a duplicate key is a problem.
"""

import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from ptf.errors import UserError
from ptf.workspace.credentials import HIDDEN, is_secret

RESOLVERS = [  # (tag, pattern of the text, first characters)
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]
TAG = "tag:yaml.org,2002:"


DEEPEST = 100  # most nested sections and lists, sections in the key of an override, and files that extend each other
MANY = 50_000  # most values in one text; those of an alias count each time that it is used
TOO_DEEP = f"sections and lists are more than {DEEPEST} deep"
LONGEST = 40  # most digits of a whole number


class CoreSchemaLoader(yaml.SafeLoader):
    """A loader of the core schema of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}


class Dumper(yaml.CSafeDumper):
    """A writer of YAML that uses the loader's resolvers, so that it quotes exactly the texts that would not be read as
    text."""

    yaml_implicit_resolvers: dict = {}

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Represent a text; quote and escape line breaks of Unicode, which PyYAML would read back as a space."""
        return self.represent_scalar(TAG + "str", data, style='"' if re.search("[\x85\u2028\u2029]", data) else None)


Dumper.add_representer(str, Dumper.represent_str)

for _tag, _pattern, _first in RESOLVERS:
    for _class in (CoreSchemaLoader, Dumper):
        _class.add_implicit_resolver(TAG + _tag, re.compile(f"^(?:{_pattern})$"), _first)

READ = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 16) if text.startswith("0x") else int(text.replace("_", "")),
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", ""))),
}


class SourceLocation(NamedTuple):
    """The place in which a value was written."""

    source: str  # a file, or the text of an override
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """An error in a config: its place, its key, and what is wrong."""

    place: SourceLocation
    key: str
    what: str

    def __str__(self) -> str:
        return "  ".join(filter(None, (str(self.place), self.key, self.what)))


class ConfigError(UserError):
    """A config is invalid."""


class Problems(ConfigError):
    """All problems of a config. The message has one line for each, in the order of the files."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.place, p.key))
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple:  # unpickling an exception calls its class with these arguments
        return Problems, (self.problems,)


@dataclass(frozen=True)
class Node:
    """A value of a config with the place where it was written."""

    value: Any  # dict[str, Node], list[Node], or a plain scalar
    place: SourceLocation
    passing: bool = False  # a section that an override only goes through; merging keeps the place of the old section

    def plain(self) -> Any:
        """Return the value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def nearest(self, path: Sequence[Any]) -> SourceLocation:
        """Return the place of the value at `path`, or else of the deepest section on the way to it."""
        node = self
        for step in path:
            held = node.value
            inside = (
                step in held
                if isinstance(held, dict)
                else isinstance(held, list) and isinstance(step, int) and step < len(held)
            )
            if not inside:
                break
            node = held[step]
        return node.place


@dataclass
class Tree:
    """A config as it was read: its nodes, and the problems that were found."""

    root: Node
    problems: list[Problem] = field(default_factory=list)
    values: int = 0  # number of values in the text that is being read
    unread: bool = False  # whether some of the text could not be read, so that a missing key may be in it

    def refuse(
        self, place: SourceLocation, key: str, what: str, *, unread: bool = False, passing: bool = False
    ) -> Node:
        """Add a problem, and return an empty section in place of what has it."""
        self.problems.append(Problem(place, key, what))
        self.unread |= unread
        return Node({}, place, passing)


def walk(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every plain value at and below one of a config, with the keys and numbers that lead to it."""
    yield where, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for step, below in inner:
        yield from walk(below, (*where, step))


def merge(*files: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Tree:
    """Merge files from left to right, then the overrides `a.b=value`, and return the tree."""
    tree = Tree(Node({}, SourceLocation(os.fspath(files[0]), 1) if files else SourceLocation("no file")))
    for file in files:
        tree.root = _over(tree.root, _file(os.fspath(file), SourceLocation(os.fspath(file)), (), tree))
    for text in overrides:
        tree.root = _over(tree.root, _override(text, tree))
    return tree


def parse(text: str, source: str = "<text>", overrides: Sequence[str] = ()) -> Tree:
    """Parse one YAML or JSON text that ptf wrote, merge the overrides `a.b=value`, and return the tree.

    `extends` in the text is relative to the working directory.
    """
    tree = Tree(Node({}, SourceLocation(source, 1)))
    tree.root = _top(text, source, (), tree)
    for override in overrides:
        tree.root = _over(tree.root, _override(override, tree))
    return tree


def near(name: str, names: Iterable[str]) -> str:
    """Return `  (did you mean …?)` with the name closest to `name`, or an empty text if none is close."""
    matches = difflib.get_close_matches(name, list(names), 1)
    return f"  (did you mean {matches[0]}?)" if matches else ""


def _over(low: Node, high: Node) -> Node:
    """Merge `high` over `low`. Sections are merged key by key; any other value replaces, and so does a section with a
    different `use` (a plugin)."""
    place = low.place if high.passing else high.place
    if not (isinstance(low.value, dict) and isinstance(high.value, dict)):
        return high
    use = high.value.get("use")
    if use and isinstance(use.value, str) and ("use" not in low.value or low.value["use"].value != use.value):
        return Node(high.value, place)
    both = {key: _over(low.value[key], node) if key in low.value else node for key, node in high.value.items()}
    return Node(low.value | both, place)


def _file(file: str, extended_at: SourceLocation, above: tuple[str, ...], tree: Tree) -> Node:
    """Read one file, merged over the files that it extends.

    `extended_at` is the place of the `extends` that names the file; it has no line if the user named the file. `above`
    are the files whose `extends` led to this one.
    """
    key = "extends" if extended_at.line else ""
    if os.path.realpath(file) in map(os.path.realpath, above):
        return tree.refuse(extended_at, key, f"the files extend each other in a circle: {' → '.join((*above, file))}")
    if len(above) >= DEEPEST:
        return tree.refuse(extended_at, key, f"more than {DEEPEST} files extend each other")
    try:
        with open(file, encoding="utf-8-sig") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as exc:
        why = (
            "no such file" if isinstance(exc, FileNotFoundError) else getattr(exc, "strerror", None) or "not UTF-8 text"
        )
        what = f"cannot read the config file {file}: {why}" if key else f"cannot read the config file: {why}"
        return tree.refuse(extended_at, key, what, unread=True)
    return _top(text, file, (*above, file), tree)


def _top(text: str, source: str, above: tuple[str, ...], tree: Tree) -> Node:
    """Return the root of one text, over the files that it extends."""
    root = _read(text, SourceLocation(source, 1), tree)
    if root is None or root.value is None:
        return Node({}, SourceLocation(source, 1))
    if not isinstance(root.value, dict):
        return tree.refuse(root.place, "", "expected keys and values at the top of the file", unread=True)
    extends = root.value.get("extends")
    if extends is None:
        return root
    own = Node({key: node for key, node in root.value.items() if key != "extends"}, root.place)
    names = extends.plain()
    names = [names] if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        tree.refuse(extends.place, "extends", "expected a file name, or a list of them")
        return own
    below = Node({}, root.place)
    for name in names:
        file = os.path.normpath(os.path.join(os.path.dirname(source) if above else "", name))
        below = _over(below, _file(file, extends.place, above, tree))
    return _over(below, own)


def _override(text: str, tree: Tree) -> Node:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    hidden = is_secret(value.strip(), path[-1], variable="env_vars" in path or "environment" in path)
    place = SourceLocation(f"--set {key}={HIDDEN}" if hidden else f"--set {text}")
    if not equals or not all(path):
        return tree.refuse(place, "", "expected key.in.dots=value", passing=True)
    if len(path) > DEEPEST:
        return tree.refuse(place, "", f"a key of more than {DEEPEST} sections", passing=True)
    node = _read(value, place, tree)
    if node is None:
        return Node({}, place, passing=True)
    for step in reversed(path):
        node = Node({step: node}, place, passing=True)
    return node


def _read(text: str, start: SourceLocation, tree: Tree) -> Node | None:
    """Parse one YAML text; return None if it is not valid.

    If `start` has a line, every node gets its own line as its place; otherwise all nodes get `start`.
    """
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text)
        # JSON is YAML except for tabs and some characters, which are escaped; the line numbers do not change
        text = text.encode("ascii", "backslashreplace").decode().replace("\x7f", "\\x7f").replace("\t", " ")
    try:
        node = yaml.compose(text, CoreSchemaLoader)
    except RecursionError:
        tree.refuse(start, "", TOO_DEEP, unread=True)
        return None
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = mark.line + 1 if mark else text[: getattr(exc, "position", 0)].count("\n") + 1
        what = getattr(exc, "problem", None) or getattr(exc, "reason", None) or str(exc)
        tree.refuse(start._replace(line=line if start.line else 0), "", f"not valid YAML: {what}", unread=True)
        return None
    tree.values = 0
    built = Node(None, start) if node is None else _build(node, (), start, (), tree)
    if tree.values <= MANY:
        return built
    what = f"more than {MANY:,} values; those of an alias are counted each time that it is used"
    tree.refuse(start, "", what, unread=True)
    return None


def _build(
    node: yaml.Node, path: tuple[str, ...], place: SourceLocation, above: tuple[yaml.Node, ...], tree: Tree
) -> Node:
    """Convert a YAML node. `above` are the nodes that contain it; an alias to one of them would be infinite."""
    tree.values += 1
    if tree.values > MANY:
        return Node(None, place)
    if len(above) >= DEEPEST:
        return tree.refuse(place, ".".join(path), TOO_DEEP, unread=True)
    where = ".".join(path)
    if any(node is outer for outer in above):
        tree.refuse(place, where, "an alias that contains itself")
        return Node(None, place)
    if isinstance(node, yaml.MappingNode):
        section: dict[str, Node] = {}
        for key, value in node.value:
            name = _joined(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            at = place._replace(line=place.line and key.start_mark.line + 1)
            if name in section:
                tree.refuse(at, ".".join((*path, name)), f"written twice; first at {section[name].place}")
            else:
                section[name] = _build(value, (*path, name), at, (*above, node), tree)
        return Node(section, place)
    if isinstance(node, yaml.SequenceNode):
        items = list[Node]()
        for i, item in enumerate(node.value):
            at = place._replace(line=place.line and item.start_mark.line + 1)
            items.append(_build(item, (*path, str(i)), at, (*above, node), tree))
        return Node(items, place)
    text, kind = node.value, node.tag.removeprefix(TAG)
    try:
        if kind == "int" and len(text) > LONGEST:
            raise ValueError
        if kind in READ:
            return Node(READ[kind](text), place)
    except ValueError:
        what = (
            f"{text!r} is not of the type {kind}"
            if len(text) <= LONGEST
            else f"{text[:LONGEST]!r}… has {len(text)} characters, too many for {kind}"
        )
        tree.refuse(place, where, what)
    if kind not in READ and kind != "str":
        tree.refuse(place, where, f"the tag {node.tag} is not supported")
    return Node(_joined(text), place)


def _joined(text: str) -> str:
    """Join surrogate pairs: JSON writes a character beyond 16 bits as two escapes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
