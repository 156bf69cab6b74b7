"""The user's own code by name: `use: pkg.mod:name` and its `args`.

A plugin is resolved to a callable with its keyword arguments bound; a wrong name is refused with the nearest right one.
"""

import functools
import importlib
import json
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ptf.config.section import Plugin
from ptf.config.tree import ConfigError, near
from ptf.workspace.credentials import resolved

T = TypeVar("T")
PLUGIN_PATH = "PTF_PLUGIN_PATH"  # of which ptf/__init__.py takes notice
PLUGINS = "ptf_plugins.json"  # in a run's directory: the directories of its plugins, and the digests of their modules


def on_path(files: Iterable[str | os.PathLike[str]]) -> None:
    """Append the directories of these configs and the current one to the path of Python modules, for plugins.

    For the config of a run they are those that it began with (`PLUGINS`). Changes `sys.path` and `PTF_PLUGIN_PATH`,
    which child processes inherit. The directories are last, so that their files do not hide installed packages.
    """
    directories = list[str]()
    for file in files:
        parent = Path(file).resolve().parent
        recorded = parent / PLUGINS
        try:
            directories += json.loads(recorded.read_bytes())["directories"] if recorded.is_file() else [str(parent)]
        except (ValueError, TypeError, LookupError):
            raise ConfigError(f"{recorded} is damaged: restore it, or begin a run with another name") from None
    for directory in dict.fromkeys([*directories, os.getcwd()]):
        if directory not in sys.path:
            sys.path.append(directory)
        if directory not in (known := plugin_path()):
            os.environ[PLUGIN_PATH] = os.pathsep.join([*known, directory])


def plugin_path() -> list[str]:
    """Return the directories of plugins, which are last on the path of Python modules."""
    return [*filter(None, os.environ.get(PLUGIN_PATH, "").split(os.pathsep))]


def resolve(use: str) -> Any:
    """Return the function or class behind `pkg.mod:name`.

    Raise ConfigError if there is none; an error inside the module itself is raised as it is.
    """
    module, colon, name = use.partition(":")
    if module.endswith(".py"):
        raise ConfigError(f"{use!r}: give the module's name, without .py and with dots between directories")
    if not (module and colon and name):
        raise ConfigError(f"{use!r} is not of the form pkg.mod:name")
    module_object = _module(module, use)
    if not hasattr(module_object, name):
        public = (n for n in vars(module_object) if not n.startswith("_"))
        raise ConfigError(f"{use}: the module {module} has no {name!r}{near(name, public)}")
    if not callable(target := getattr(module_object, name)):
        raise ConfigError(f"{use} is not callable: it is of type {type(target).__name__}")
    return target


def own_copy(value: T) -> T:
    """Return a copy for a call of users' code, which may change all that it is given.

    The value is picklable: data rows, responses and arguments are sent to other processes, too.
    """
    return pickle.loads(pickle.dumps(value))


class Bound(functools.partial[Any]):
    """A callable with keyword arguments, of which each call has a copy."""

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        """Call it."""
        return self.func(*args, **{**own_copy(self.keywords), **keywords})


def bind(plugin: Plugin) -> Callable[..., Any]:
    """Return the plugin's callable with its `args` bound as keyword arguments."""
    return Bound(resolve(plugin.use), **resolved(plugin.args, plugin.use))


def _module(name: str, use: str) -> ModuleType:
    """Import a module, or say which part of its dotted name is not there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # of what the module imports
            raise
        parent, _, part = str(error.name).rpartition(".")
    inside = list(getattr(sys.modules[parent], "__path__", ())) if parent else None  # None: the whole Python path
    where = (
        f"the package {parent}"
        if inside
        else f"{parent}, which is no package"
        if parent
        else "the Python path: install it, or add its directory"
    )
    gone = [] if parent else [place for place in plugin_path() if not os.path.isdir(place)]
    raise ConfigError(
        f"{use}: no module {part!r} in {where}"
        f"{near(part, (module.name for module in pkgutil.iter_modules(inside)))}"
        f"{'; the run began with modules in ' + ', '.join(gone) + ', which is gone' if gone else ''}"
    )
