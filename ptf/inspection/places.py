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

HOW = "`ptf inspect` prints the number of passes over the data and of steps"
MADE_LATER = ("prepare:", "job:")  # written by an earlier step, or looked up when the job is run
ELSEWHERE = "; if the job runs on a different machine, or a different job writes it, use ptf check --skip-paths"
DATA = (("data", "sources", "*", "path"), ("data", "validation", "*", "path"), ("evaluate", "sources", "*", "path"))
MODELS = (
    *(("model", "path"), ("model", "tokenizer")),
    *(("rollout", "reward_model", "path"), ("algo", "teachers", "*", "path")),
)
PROGRAMS = (("rollout", "harness", "python"), ("rollout", "harness", "command"))  # an agent's interpreter, its command


def missing(root: Node) -> Iterator[Problem]:
    """Yield a Problem for each local path of a config that does not exist, with the line that names it.

    The config need not be valid. Hub ids and URIs of object stores are not looked up.
    """
    values = root.plain()
    kinds = {"": (DATA, _has_data), "model directory ": (MODELS, _has_model), "program ": (PROGRAMS, shutil.which)}
    for kind, (places, is_here) in kinds.items():
        for where, named in (found for keys in places for found in _texts(values, keys)):
            if not is_here(named):
                yield problem(root, where, f"there is no {kind}{named} on this machine{ELSEWHERE}")


def _texts(values: Any, keys: tuple[str, ...], where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each text at the keys, of which `*` is any, after its own keys; of a list of words, the first one."""
    if isinstance(values, Mapping) and keys:
        for key in values if keys[0] == "*" else keys[:1]:
            yield from _texts(values.get(key), keys[1:], (*where, key))
    elif not keys:
        text = values[0] if isinstance(values, list) and values else values
        if isinstance(text, str):
            yield where, text


def is_here(path: str) -> bool:
    """Return whether there is something at a path, or at one that a pattern matches, on this machine."""
    path = path.removeprefix("file://").rstrip("/")
    return bool(os.path.exists(path) or glob.glob(path))


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
    return is_here(os.path.expanduser(hub.without_names(path)[0]))


def _has_model(path: str) -> bool:
    """Return whether a model may be at a path: the path exists, or it may be a Hub id.

    `owner/name` is taken for a missing directory only if `owner` is a directory on this machine.
    """
    if path.startswith(MADE_LATER) or "://" in path or os.path.exists(path):
        return True
    owner, _, name = at_revision(path)[0].partition("/")
    return bool(name) and "/" not in name and not path.startswith((".", "/", "~")) and not os.path.isdir(owner)
