"""YAML files as one tree of nodes that know where they were written. No schema here: reading, `extends`,
merging, `a.b=value`.

Every value keeps its `Place` (file:line, or the override it came from) through every merge, so whatever is found wrong
later can name the line to mend. Nothing raises: problems are collected in the tree, for the loader to report all at
once.

The dialect is YAML 1.2's core: `1e-4` is a number, only true and false are booleans, a date is text, keys are always
text, a key written twice is a problem.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import yaml

from ptf.config.renames import SEAL, outdated
from ptf.credentials import HIDDEN, is_secret

RESOLVERS = [  # (tag, what matches, first characters)
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


DEEPEST = 100  # sections and lists inside each other, keys of an override, files that extend each other
MANY = 50_000  # values in one text, those behind an alias each time that it stands there
LONGEST = 40  # digits of a whole number


class TooMuch(Exception):
    """What no config needs, and what would take all memory or the stack."""


class Loader(yaml.SafeLoader):
    """A loader of YAML that refuses texts nested too deeply."""

    yaml_implicit_resolvers: dict = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node as PyYAML does. Raise MarkedYAMLError below `DEEPEST` levels."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"sections and lists are more than {DEEPEST} deep", problem_mark=self.peek_event().start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """Shares the loader's table, so that it quotes exactly the texts that would be read as something else."""

    yaml_implicit_resolvers: dict = {}

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: nothing is written as an alias."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """PyYAML writes the line breaks of Unicode bare, and reads them back as a space; escape them."""
        return self.represent_scalar(TAG + "str", data, style='"' if re.search("[\x85\u2028\u2029]", data) else None)


Dumper.add_representer(str, Dumper.represent_str)

for _tag, _pattern, _first in RESOLVERS:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(TAG + _tag, re.compile(f"^(?:{_pattern})$"), _first)

READ = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: _whole(text),
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", ""))),
}


def _whole(text: str) -> int:
    if len(text) > LONGEST:
        raise ValueError
    return int(text, 16) if text.startswith("0x") else int(text.replace("_", ""))


class Place(NamedTuple):
    """Where a value was written."""

    source: str  # a file, or an override as it was typed
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """What is wrong with a key, and where it was written."""

    place: Place
    key: str
    what: str

    def __str__(self) -> str:
        return "  ".join(filter(None, (str(self.place), self.key, self.what)))


@dataclass(frozen=True)
class Node:
    """A value of a config with the place where it was written."""

    value: Any  # dict[str, Node], list[Node], or a plain scalar
    place: Place
    passing: bool = False  # a section that an override only goes through: it does not claim the place

    def plain(self) -> Any:
        """Return the value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def nearest(self, path: Sequence[Any]) -> Place:
        """Where `path` was written, or else the deepest section on the way to it."""
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
    """What was read of a config: its nodes, and the problems that were found on the way."""

    root: Node
    problems: list[Problem] = field(default_factory=list)
    values: int = 0  # in the text that is being read
    unread: bool = False  # some of the text could not be read, so a key that is absent may be in it


def merge(*files: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Tree:
    """All files, left to right, then the overrides `a.b=value`."""
    tree = Tree(Node({}, Place(os.fspath(files[0]), 1) if files else Place("no file")))
    for file in files:
        tree.root = _over(tree.root, _file(os.fspath(file), Place(os.fspath(file)), (), tree))
    for text in overrides:
        tree.root = _over(tree.root, _override(text, tree))
    return tree


def parse(text: str, source: str = "<text>", overrides: Sequence[str] = ()) -> Tree:
    """One YAML or JSON text that ptf wrote (names of an older version are translated), and overrides as above;
    `extends` in it is relative to the working directory."""
    tree = Tree(Node({}, Place(source, 1)))
    tree.root = _top(text, source, (), True, tree)
    for override in overrides:
        tree.root = _over(tree.root, _override(override, tree))
    return tree


def read(text: str, source: str) -> Tree:
    """One YAML or JSON text as it stands: nothing is translated, and `extends` is a key like others."""
    tree = Tree(Node({}, Place(source, 1)))
    tree.root = _read(text, Place(source, 1), tree) or tree.root
    return tree


def near(name: str, names: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing where no name is close."""
    matches = difflib.get_close_matches(name, list(names), 1)
    return f"  (did you mean {matches[0]}?)" if matches else ""


def _over(low: Node, high: Node) -> Node:
    """`high` over `low`: sections merge key by key, everything else replaces,
    and so does a plug that names another `use`."""
    place = low.place if high.passing else high.place
    if not (isinstance(low.value, dict) and isinstance(high.value, dict)):
        return high
    use = high.value.get("use")
    if use and isinstance(use.value, str) and ("use" not in low.value or low.value["use"].value != use.value):
        return Node(high.value, place)
    both = {key: _over(low.value[key], node) if key in low.value else node for key, node in high.value.items()}
    return Node(low.value | both, place)


def _file(file: str, extended_at: Place, above: tuple[str, ...], tree: Tree) -> Node:
    """One file with all that it extends. `asked` is who named it, `above` the files that led here."""
    key = "extends" if extended_at.line else ""
    if os.path.realpath(file) in map(os.path.realpath, above):
        tree.problems.append(
            Problem(extended_at, key, f"the files extend each other in a circle: {' → '.join((*above, file))}")
        )
        return Node({}, extended_at)
    if len(above) >= DEEPEST:
        tree.problems.append(Problem(extended_at, key, f"more than {DEEPEST} files extend each other"))
        return Node({}, extended_at)
    try:
        with open(file, encoding="utf-8-sig") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as exc:
        why = (
            "no such file" if isinstance(exc, FileNotFoundError) else getattr(exc, "strerror", None) or "not UTF-8 text"
        )
        tree.problems.append(
            Problem(
                extended_at,
                key,
                f"cannot read the config file {file}: {why}" if key else f"cannot read the config file: {why}",
            )
        )
        tree.unread = True
        return Node({}, extended_at)
    stored = text.rstrip().rpartition("\n")[2].startswith(SEAL)
    return _top(text, file, (*above, file), stored, tree)


def _top(text: str, source: str, above: tuple[str, ...], stored: bool, tree: Tree) -> Node:
    """Return the root of one text, over the files that it extends.

    `stored` says that ptf wrote it, perhaps an older version.
    """
    root = _read(text, Place(source, 1), tree)
    if root is None or root.value is None:
        return Node({}, Place(source, 1))
    if not isinstance(root.value, dict):
        tree.problems.append(Problem(root.place, "", "expected keys and values at the top of the file"))
        tree.unread = True
        return Node({}, root.place)
    _translate(root, stored, tree)
    extends = root.value.get("extends")
    if extends is None:
        return root
    own = Node({key: node for key, node in root.value.items() if key != "extends"}, root.place)
    names = extends.plain()
    names = [names] if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        tree.problems.append(Problem(extends.place, "extends", "expected a file name, or a list of them"))
        return own
    below = Node({}, root.place)
    for name in names:
        file = os.path.normpath(os.path.join(os.path.dirname(source) if above else "", name))
        below = _over(below, _file(file, extends.place, above, tree))
    return _over(below, own)


def _override(text: str, tree: Tree) -> Node:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    hidden = is_secret(value.strip(), path[-1], variable="environment" in path)
    place = Place(f"--set {key}={HIDDEN}" if hidden else f"--set {text}")
    if not equals or not all(path):
        tree.problems.append(Problem(place, "", "expected key.in.dots=value"))
        return Node({}, place, passing=True)
    if len(path) > DEEPEST:
        tree.problems.append(Problem(place, "", f"a key of more than {DEEPEST} sections"))
        return Node({}, place, passing=True)
    node = _read(value, place, tree)
    if node is None:
        return Node({}, place, passing=True)
    for step in reversed(path):
        node = Node({step: node}, place, passing=True)
    _translate(node, False, tree)
    return node


def _translate(root: Node, stored: bool, tree: Tree) -> None:
    """Give keys and addresses the names that they have today. Each that had another is a problem,
    but not in what was stored."""
    for rename in reversed(outdated(root.plain())):
        section = reduce(lambda node, step: node.value[step], rename.path[:-1], root).value
        name = rename.path[-1]
        place = section[name].place
        if rename.of_key and rename.text in section:
            section.pop(name)
            tree.problems.append(Problem(place, rename.key, f"is now {rename.new}, which is there too; remove one"))
            continue
        if rename.of_key:
            section[rename.text] = section.pop(name)
        else:
            section[name] = replace(section[name], value=rename.text)
        if not stored:
            what = f"is now {rename.new}" if rename.of_key else f"{rename.old} is now {rename.new}"
            upgrade = f"; `ptf upgrade {place.source}` rewrites it" if place.line else ""
            tree.problems.append(Problem(place, rename.key, what + upgrade))


def _read(text: str, start: Place, tree: Tree) -> Node | None:
    """One YAML text; None where it is not valid. With a line in `start` every node gets its own line,
    without one all get `start`."""
    try:
        node = yaml.compose(_json_as_yaml(text), Loader)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = mark.line + 1 if mark else text[: getattr(exc, "position", 0)].count("\n") + 1
        what = getattr(exc, "problem", None) or getattr(exc, "reason", None) or str(exc)
        tree.problems.append(Problem(start._replace(line=line if start.line else 0), "", f"not valid YAML: {what}"))
        tree.unread = True
        return None
    tree.values = 0
    try:
        return Node(None, start) if node is None else _build(node, (), start, (), tree)
    except TooMuch:
        tree.problems.append(
            Problem(
                start, "", f"more than {MANY:,} values, those behind an alias counted each time that it stands there"
            )
        )
        tree.unread = True
        return None


def _build(node: yaml.Node, path: tuple[str, ...], place: Place, above: tuple[yaml.Node, ...], tree: Tree) -> Node:
    """`above` are the nodes around this one: an alias to one of them would never end."""
    tree.values += 1
    if tree.values > MANY:
        raise TooMuch

    def at(inner):
        return Place(place.source, inner.start_mark.line + 1) if place.line else place

    if any(node is outer for outer in above):
        tree.problems.append(Problem(place, ".".join(path), "an alias that contains itself"))
        return Node(None, place)
    if isinstance(node, yaml.MappingNode):
        section: dict[str, Node] = {}
        for key, value in node.value:
            name = _joined(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            if name in section:
                tree.problems.append(
                    Problem(at(key), ".".join((*path, name)), f"written twice; first at {section[name].place}")
                )
            else:
                section[name] = _build(value, (*path, name), at(key), (*above, node), tree)
        return Node(section, place)
    if isinstance(node, yaml.SequenceNode):
        return Node(
            [_build(item, (*path, str(i)), at(item), (*above, node), tree) for i, item in enumerate(node.value)], place
        )
    return Node(_scalar(node, path, place, tree), place)


def _scalar(node: yaml.Node, path: tuple[str, ...], place: Place, tree: Tree) -> Any:
    text, kind = node.value, node.tag.removeprefix(TAG)
    try:
        if kind in READ:
            return READ[kind](text)
    except ValueError:
        what = (
            f"{text!r} is not of the type {kind}"
            if len(text) <= LONGEST
            else f"{text[:LONGEST]!r}… has {len(text)} characters, too many for {kind}"
        )
        tree.problems.append(Problem(place, ".".join(path), what))
    if kind not in READ and kind != "str":
        tree.problems.append(Problem(place, ".".join(path), f"the tag {node.tag} means nothing here"))
    return _joined(text)


def _json_as_yaml(text: str) -> str:
    """JSON is YAML, but for tabs and for characters that YAML folds or refuses: escape those.
    Lines stay what they are."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.encode("ascii", "backslashreplace").decode().replace("\x7f", "\\x7f").replace("\t", " ")


def _joined(text: str) -> str:
    """JSON writes characters beyond 16 bits as two escapes; make them one again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
