"""The code of plugins: the modules that a config names and all that they import, apart from Python's own modules,
installed packages and ptf.

What is stored under a key that names plugins is made again when their code changes. Imports are read from the source,
and no module is run.
"""

import ast
import hashlib
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ptf.config.tree import walk

PYTHON = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
INSTALLED = {"site-packages", "dist-packages"}
BY_NAME = {"import_module", "__import__", "run_path", "run_module", "exec_module"}  # functions that import


@dataclass
class Code:
    """The code of some plugins."""

    digests: dict[str, str] = field(default_factory=dict)  # module → SHA-256 of its file
    unseen: list[str] = field(default_factory=list)  # why a change may go unnoticed, a sentence each


def uses(value: Any) -> list[str]:
    """Return what each plugin at or below a value of a config names."""
    return [inner["use"] for _, inner in walk(value) if isinstance(inner, dict) and isinstance(inner.get("use"), str)]


def code_of(value: Any) -> Code:
    """Return the code of all plugins at or below a value of a config."""
    code, seen = Code(), set[str]()
    waiting = [use.partition(":")[0] for use in uses(value)]
    for module in waiting:
        if module.partition(".")[0] != "ptf" and _spec(module) is None:
            code.unseen.append(f"the module {module} is not found here, so a change of its code goes unnoticed")
    while waiting:
        parts = waiting.pop().split(".")
        for module in (".".join(parts[: n + 1]) for n in range(len(parts))):  # its packages, too
            if module not in seen:
                seen.add(module)
                waiting += _read(module, code)
    code.digests = dict(sorted(code.digests.items()))
    return code


def _read(module: str, code: Code) -> list[str]:
    """Add a module to the code, and return the names that it imports; those of attributes are no modules."""
    spec = _spec(module)
    if module.partition(".")[0] == "ptf" or spec is None or not spec.has_location or spec.origin is None:
        return []
    file = Path(spec.origin).resolve()
    if INSTALLED & set(file.parts) or PYTHON & set(file.parents):
        return []
    text = file.read_bytes()
    code.digests[module] = hashlib.sha256(text).hexdigest()
    if file.suffix != ".py":
        code.unseen.append(f"{file} is no Python source: a change of what it uses goes unnoticed")
        return []
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []  # importing it fails
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    imported = list[str]()
    for node in nodes:
        match node:
            case ast.Import():
                imported += [alias.name for alias in node.names]
            case ast.ImportFrom():
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                imported += [base, *(f"{base}.{alias.name}" for alias in node.names)]
            case ast.Call() if getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME:
                code.unseen.append(
                    f"{file}:{node.lineno} imports a module by a name that is computed: a change of its code goes "
                    "unnoticed"
                )
    return imported


def _spec(module: str) -> ModuleSpec | None:
    """Find a module without importing its packages; None for one that is not there, or that is Python's own."""
    top, *rest = module.split(".")
    if top in sys.stdlib_module_names:
        return None
    try:
        spec = find_spec(top)
    except ValueError:  # it is the program that runs
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec
