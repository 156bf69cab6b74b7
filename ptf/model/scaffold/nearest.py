"""The family that is nearest to a model, and where the source of their modules differs."""

import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from ptf.model.families import MODULES, family_of
from ptf.model.scaffold.reference import Reference

FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward")
DERIVED = ("DecoderLayer", "Attention", "MLP", "SparseMoeBlock", "MoE")
SHOWN = 6  # lines of a difference


@dataclass(frozen=True, slots=True)
class Difference:
    """A class or a function that is written differently in transformers' file of the nearest family."""

    name: str
    inherits: str  # from what transformers derives it (modular_NAME.py), "" if that is not known
    lines: tuple[str, ...]  # the first ones that differ
    count: int


def nearest_family(reference: Reference, mapped: Set[str]) -> str:
    """Return the family that has most of the parameters that were mapped (ptf's names) and whose settings are most
    alike: of those from whose classes transformers derives this model's (modular_NAME.py), if there are any; else, of
    the four best, the one whose source is most alike."""
    keys, scores = set(reference.defaults), []
    for name in MODULES:
        names = {ours for mapping in family_of({"model_type": name}).mappings for ours in mapping.ours}
        if name == reference.model_type or (defaults := _defaults(name)) is None:
            continue
        alike = len(mapped & names) / max(1, len(mapped)), len(keys & defaults) / len(keys | defaults)
        scores.append((sum(alike), name))
    classes = {_prefix_of(name): name for _, name in scores}
    module = type(reference.model).__module__
    derived = {_derived_from(module, role, classes) for role in DERIVED} - {""}
    if derived:
        return max((score, name) for score, name in scores if name in derived)[1]
    best = [name for _, name in sorted(scores, reverse=True)[:4]]
    return max(best, key=lambda name: _alike(reference, name))


def _prefix_of(name: str) -> str:
    """Return with what the names of a family's classes begin."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
    return kind.__name__.removesuffix("ForCausalLM")


def _derived_from(module_name: str, role: str, families: Mapping[str, str]) -> str:
    """Return the family from whose class of this role a file's class is derived, at whatever distance; "" if none is
    known."""
    tree = _modular(module_name)
    if tree is None:
        return ""
    package = module_name.rpartition(".")[0]
    imported = {
        alias.name: resolve_name("." * node.level + (node.module or ""), package)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith(role):
            continue
        for base in map(ast.unparse, node.bases):
            if base not in imported or not base.endswith(role):
                continue
            found = families.get(base.removesuffix(role)) or _derived_from(imported[base], role, families)
            if found:
                return found
    return ""


def _defaults(name: str) -> set[str] | None:
    """Return the settings of a family, None for one that wraps a language model."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    return None if getattr(kind, "sub_configs", {}).get("text_config") else set(kind().to_dict())


def _alike(reference: Reference, name: str) -> float:
    mine, theirs = _sources(type(reference.model).__module__), _sources(_module_of(name))
    roles = [role for role in mine if role in theirs and role.endswith(("Attention", "MLP", "DecoderLayer", "RMSNorm"))]
    ratios = [difflib.SequenceMatcher(None, mine[r], theirs[r]).ratio() for r in roles]
    return sum(ratios) / 4


def _module_of(name: str) -> str:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]].__module__


def _sources(module_name: str) -> dict[str, list[str]]:
    """Return the lines of each class and function of a file of transformers, without comments, docstrings, types and
    the name of the model; by its name without that of the model."""
    module = importlib.import_module(module_name)
    tree = ast.parse(inspect.getsource(module))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    prefix = next((n.removesuffix("ForCausalLM") for n in classes if n.endswith("ForCausalLM")), "")
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.arg):
                part.annotation = None
            if isinstance(part, ast.FunctionDef):
                part.returns = None
            if isinstance(part, ast.ClassDef | ast.FunctionDef):
                part.decorator_list = []
                if ast.get_docstring(part) is not None and len(part.body) > 1:
                    part.body = part.body[1:]
        text = re.sub(rf"\b{prefix}(?=[A-Z])", "", ast.unparse(node)) if prefix else ast.unparse(node)
        found[node.name.removeprefix(prefix)] = text.replace("torch.nn.", "nn.").splitlines()
    return found


def differences(reference: Reference, family: str) -> Iterator[Difference]:
    """Yield what the small model uses and what is written differently from the family's, with the lines."""
    module = type(reference.model).__module__
    mine, theirs, parents = _sources(module), _sources(_module_of(family)), _inherits(module)
    prefix = type(reference.model).__name__.removesuffix("ForCausalLM")
    used = {type(m).__name__ for m in reference.model.modules() if type(m).__module__ == module}
    for name in (*sorted(used), *FUNCTIONS):
        role = name.removeprefix(prefix)
        if role not in mine or role in ("ForCausalLM", "Model") or mine[role] == theirs.get(role):
            continue
        if role not in theirs:
            yield Difference(name, parents.get(name, ""), (f"{family} has no {role}",), 1)
            continue
        lines = [
            line
            for line in difflib.unified_diff(theirs[role], mine[role], lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]
        if not set(map(_meaning, lines)) - {""}:
            continue
        yield Difference(name, parents.get(name, ""), tuple(lines[:SHOWN]), len(lines))


def _meaning(line: str) -> str:
    """Return a line without what does not matter: an annotation of types, an attribute for tensor parallelism."""
    return "" if re.match(r"[+-]\s*(is_causal|config: |super\()", line) else line


def _inherits(module_name: str) -> dict[str, str]:
    """Return the base classes in modular_NAME.py, from which transformers writes its file."""
    tree = _modular(module_name)
    return {
        node.name: ", ".join(map(ast.unparse, node.bases))
        for node in (tree.body if tree else ())
        if isinstance(node, ast.ClassDef) and node.bases
    }


def _modular(module_name: str) -> ast.Module | None:
    """Return the modular_NAME.py from which transformers writes a file, None for one that is written by hand."""
    file = Path(inspect.getsourcefile(importlib.import_module(module_name)) or "")
    modular = file.with_name(file.name.replace("modeling_", "modular_"))
    return ast.parse(modular.read_text()) if modular.is_file() and modular != file else None


def rotates_pairs(reference: Reference) -> bool:
    """Whether neighbouring dimensions are rotated together, rather than those of two halves."""
    sources: dict[str, Any] = _sources(type(reference.model).__module__)
    return any("::2" in line for name in FUNCTIONS[:2] for line in sources.get(name, ()))


def norms_after_rotation(reference: Reference) -> bool:
    """Whether the attention normalises queries after it has rotated them."""
    lines = _sources(type(reference.model).__module__).get("Attention", [])
    rotated = next((at for at, line in enumerate(lines) if "apply_rotary_pos_emb(" in line), None)
    return rotated is not None and any(re.search(r"= self\.\w*norm\w*\(quer", line) for line in lines[rotated:])


def has(reference: Reference, name: str) -> bool:
    """Whether transformers' file has a class or function of this name."""
    return name in _sources(type(reference.model).__module__)
