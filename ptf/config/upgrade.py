"""Rewriting old names in a config file: `ptf upgrade CONFIG`.

The text is edited where the YAML parser found each name, so that comments and layout stay; the result is parsed again
and must be the translated config, or nothing is written.
"""

import os
import shutil
from pathlib import Path

import yaml

from ptf import scratch
from ptf.config.load import ConfigError, Problems
from ptf.config.renames import Rename, holder_of, outdated, renamed, sealed
from ptf.config.tree import Loader, Problem, read


def upgrade(*files: str) -> list[str]:
    """Rewrite the old names in each of these files, in place and atomically; files that they extend are not followed.
    Returns a line for each change. Raises ConfigError, and writes nothing, if one of the files cannot be rewritten."""
    lines, texts = [], {}
    for file in dict.fromkeys(files):
        text = _text(file)
        new, changes = upgraded(text, file)
        lines += changes or [f"{file}  has no old names"]
        if new != text:
            texts[file] = new
    for file, text in texts.items():
        _write(Path(file).resolve(), text)  # a link stays a link
    return lines


def upgraded(text: str, source: str) -> tuple[str, list[str]]:
    """Return a config's text with the names of today, and a line for each change.

    Raise ConfigError for a text that cannot be read, or in which a name cannot be replaced.
    """
    if sealed(text)[1]:
        raise ConfigError(f"{source} was written by a run, which reads it in every version; it is not to be changed")
    tree = read(text, source)
    if tree.problems:
        raise Problems(tree.problems)
    values = tree.root.plain()
    renames = outdated(values)
    if not renames:
        return text, []
    problems, edits, lines = [], {}, []
    root = _composed(text)
    for rename in renames:
        place = tree.root.nearest(rename.path)
        if rename.of_key and rename.text in holder_of(values, rename):
            what = f"is now {rename.new}, which is there too; remove one"
            problems.append(Problem(place, rename.key, what))
        elif (edit := _edit(text, root, rename)) is None:
            problems.append(Problem(place, rename.key, f"write {rename.new} here yourself: it cannot be replaced"))
        else:
            start, end, written = edit
            edits[start, end] = written
            key = "" if rename.of_key else f"{rename.key}  "
            lines.append(f"{place}  {key}{rename.old} is now {rename.new}")
    if problems:
        raise Problems(problems)
    for (start, end), written in sorted(edits.items(), reverse=True):
        text = text[:start] + written + text[end:]
    if read(text, source).root.plain() != renamed(values, renames):
        raise ConfigError(f"{source} cannot be rewritten; replace by hand:\n  " + "\n  ".join(lines))
    return text, lines


def _text(file: str) -> str:
    try:
        return Path(file).read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None


def _write(file: Path, text: str) -> None:
    """Replace a file at once, with the permissions that it has."""
    with scratch.file(file) as part:
        part.write_bytes(text.encode())
        shutil.copymode(file, part)
        os.replace(part, file)


def _composed(text: str) -> yaml.Node | None:
    """Return the nodes of a text that was found readable.

    Return None where only JSON can be read in it (it has tabs), not YAML.
    """
    try:
        return yaml.compose(text, Loader)
    except yaml.YAMLError:
        return None


def _edit(text: str, root: yaml.Node | None, rename: Rename) -> tuple[int, int, str] | None:
    """Return (start, end, replacement) of an old name in a text; None if the text does not contain it literally."""
    node, key = root, None
    for step in rename.path:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            key, node = next((pair for pair in node.value if pair[0].value == step), (None, None))
    old, node = (rename.path[-1], key) if rename.of_key else (rename.old, node)
    if node is None:
        return None
    start, end = node.start_mark.index, node.end_mark.index
    before, match, behind = text[start:end].rpartition(str(old))  # around it: quotation marks, an anchor
    return (start, end, before + rename.text + behind) if match else None
