"""Data files, model directories and programs that a config names and this machine does not have."""

import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from ptf.config.plugin_checks import problem
from ptf.config.tree import Node, Problem
from ptf.data.sources import hub
from ptf.errors import UserError
from ptf.storage.hub import at_revision

MADE_LATER = ("prepare:", "job:")  # written by an earlier step, or looked up when the job is run
ELSEWHERE = "; if the job runs on a different machine, or a different job writes it, use ptf check --skip-paths"
SECTIONS = (("data", "sources"), ("data", "validation"), ("evaluate", "sources"))


def missing(root: Node) -> Iterator[Problem]:
    """Yield a Problem for each local path of a config that does not exist, with the line that names it.

    The config need not be valid. Hub ids and URIs of object stores are not looked up.
    """
    values = root.plain()
    for where in SECTIONS:
        sources = _at(values, where)
        for name, source in sources.items() if isinstance(sources, Mapping) else ():
            if isinstance(source, Mapping) and isinstance(path := source.get("path"), str) and not _has_data(path):
                yield problem(root, (*where, name, "path"), f"there is no {path} on this machine{ELSEWHERE}")
    for where in _model_keys(values, ()):
        if not _has_model(path := _at(values, where)):
            yield problem(root, where, f"there is no model directory {path} on this machine{ELSEWHERE}")
    for where, program in _programs(values):
        if shutil.which(program) is None:
            yield problem(root, where, f"there is no program {program} on this machine{ELSEWHERE}")


def _at(values: Any, where: tuple[str, ...]) -> Any:
    """Return the value at a key; None if there is none."""
    for key in where:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _model_keys(values: Any, where: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the keys whose value names a model to load: the job's model, its reward model and its teachers."""
    for key in (("model", "path"), ("model", "tokenizer"), ("rollout", "reward_model", "path")):
        if isinstance(_at(values, key), str):
            yield key
    teachers = _at(values, ("algo", "teachers"))
    for name in teachers if isinstance(teachers, Mapping) else ():
        if isinstance(_at(teachers, (name, "path")), str):
            yield ("algo", "teachers", name, "path")


def _programs(values: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys that name a program to run, and the program: an agent's interpreter, or its command."""
    harness = ("rollout", "harness")
    if isinstance(python := _at(values, (*harness, "python")), str):
        yield (*harness, "python"), python
    command = _at(values, (*harness, "command"))
    if isinstance(command, list) and command and isinstance(command[0], str):
        yield (*harness, "command"), command[0]


def _has_data(path: str) -> bool:
    """Return whether there are data at a path; True also if that cannot be checked on this machine."""
    path = path.removeprefix("file://")
    if path.startswith(MADE_LATER) or "://" in path:
        return True
    try:
        if hub.parse_location(path) is not None:
            return True
    except UserError:
        return True  # the check of the config reports this error
    path = hub.without_names(path)[0]
    return bool(glob.glob(os.path.expanduser(path).rstrip("/")) or os.path.exists(path))


def _has_model(path: str) -> bool:
    """Return whether a model may be at a path: the path exists, or it may be a Hub id.

    `owner/name` is taken for a missing directory only if `owner` is a directory on this machine.
    """
    if path.startswith(MADE_LATER) or "://" in path or os.path.exists(path):
        return True
    owner, _, name = at_revision(path)[0].partition("/")
    return bool(name) and "/" not in name and not path.startswith((".", "/", "~")) and not os.path.isdir(owner)
