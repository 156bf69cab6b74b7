"""Figures of the code itself: sizes, docstrings, repetition, config keys, what a recipe touches, imports.
Writes results/code_figures.md.

    python benchmarks/code_figures.py [--tree DIR] [--as COLUMN]

Each call measures a tree (default: this one) and writes its column (default: `now`) of results/code_figures.json;
the page shows all columns.
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from commands import ROOT, options
from pages import table

FIGURES = ROOT / "benchmarks" / "results" / "code_figures.json"
PACKAGES = ("ptf", "steps", "flows")
# the first line is no sentence in the imperative that begins with a capital and ends
FRAGMENTS = "D400,D401,D403,D404,D415"
UNDOCUMENTED = "D100,D101,D102,D103,D104"
RUN = 6  # lines that two places must share to count as a pair


def files(tree: Path, *packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (tree / package).rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def duplicate_pairs(paths: list[Path]) -> int:
    """Pairs of places that share RUN or more lines; blank lines, comments,
    imports and lone punctuation do not count."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, path in enumerate(paths):
        lines = [re.sub(r"\s+", " ", line.strip()) for line in path.read_text().splitlines()]
        lines = [line for line in lines if re.search(r"\w", line) and not re.match(r"#|from |import ", line)]
        for begin in range(len(lines) - RUN + 1):
            places[tuple(lines[begin : begin + RUN])].append((number, begin))
    shared = {
        (a, b) for found in places.values() if len(found) > 1 for i, a in enumerate(found) for b in found[i + 1 :]
    }
    continued = {((f, i + 1), (g, j + 1)) for (f, i), (g, j) in shared}
    return len(shared - continued)


def rules(tree: Path, select: str) -> int:
    """How often ruff's rules are broken in the packages."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", select]
    command += ["--output-format", "json", *PACKAGES]
    return len(json.loads(subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).stdout))


def import_seconds(tree: Path, module: str) -> float:
    """CPU-seconds of a process that imports a module and ends: the least of three."""
    code = f"import time, {module}; print(time.process_time())"
    run = [sys.executable, "-c", code]
    return min(
        float(subprocess.run(run, cwd=tree, capture_output=True, text=True, check=True).stdout) for _ in range(3)
    )


def config_keys(tree: Path) -> int:
    """Rows of the tables of docs/config.md."""
    return sum(line.startswith("| `") for line in (tree / "docs" / "config.md").read_text().splitlines())


def config_fields(tree: Path) -> int:
    """Fields that the classes of the config declare, each where it is declared."""
    code = """
import importlib, pkgutil
from pydantic import BaseModel
for name in ("ptf.config", "ptf.recipes"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if not module.name.endswith("recipe"):
            importlib.import_module(module.name)
def below(kind):
    return {kind}.union(*map(below, kind.__subclasses__()))
kinds = [kind for kind in below(BaseModel) if kind.__module__.startswith("ptf")]
print(sum(name in kind.model_fields for kind in kinds for name in kind.__annotations__))
"""
    run = [sys.executable, "-c", code]
    return int(subprocess.run(run, cwd=tree, capture_output=True, text=True, check=True).stdout)


def executed(tree: Path, job: str) -> dict[str, float]:
    """Files and functions of ptf that a tiny job enters (benchmarks/executed.py)."""
    run = [sys.executable, "benchmarks/executed.py", job]
    done = subprocess.run(run, cwd=tree, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {f"{what} that a tiny {job} executes": n for what, n in found.items()}


def recipe_files(tree: Path, recipe: str) -> int:
    """Files of ptf outside the recipe's own that name it, as a word of the code."""
    named = re.compile(rf"(?<![A-Za-z0-9])({recipe}|{recipe.upper()}|{recipe.capitalize()})(?![a-z0-9])")
    return sum(
        bool(named.search(path.read_text()))
        for path in files(tree, "ptf")
        if recipe not in path.parts and path.stem != recipe
    )


def measure(tree: Path) -> dict[str, float]:
    code = files(tree, *PACKAGES)
    texts = [path.read_text() for path in code]
    lines = [line for text in texts for line in text.splitlines()]
    return {
        "files": len(code),
        "lines": len(lines),
        "files of more than 300 lines": sum(text.count("\n") > 300 for text in texts),
        "functions of more than 60 lines": sum(length > 60 for path in code for _, length in functions(path)),
        "lines of more than 120 columns": sum(len(line) > 120 for line in lines),
        "`fmt: skip`": sum("# fmt: skip" in line for line in lines),
        "assigned lambdas": sum(bool(re.match(r"\s*\w+(: [^=]+)? = lambda\b", line)) for line in lines),
        "docstrings that begin with a fragment": rules(tree, FRAGMENTS),
        "public things without a docstring": rules(tree, UNDOCUMENTED),
        "pairs of places that share 6 lines": duplicate_pairs(code),
        "ignored type errors": sum(len(re.findall(r"# (?:type|pyright): ignore", text)) for text in texts),
        "config keys": config_keys(tree),
        "declared config fields": config_fields(tree),
        **executed(tree, "SFT"),
        **executed(tree, "GRPO"),
        "other files that name the recipe kd": recipe_files(tree, "kd"),
        "other files that name the recipe ppo": recipe_files(tree, "ppo"),
        "CPU-seconds to import ptf.cli": round(import_seconds(tree, "ptf.cli"), 2),
        "CPU-seconds to import ptf.run": round(import_seconds(tree, "ptf.run"), 2),
        "CPU-seconds to import ptf.data.tokenizer": round(import_seconds(tree, "ptf.data.tokenizer"), 2),
    }


def page(columns: dict[str, dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[name, *(column.get(name, "–") for column in columns.values())] for name in names]
    return f"""# Figures of the code

Command: `python benchmarks/code_figures.py`, over `ptf/`, `steps/` and `flows/`.

{table(["", *columns], rows)}

Docstrings are judged by ruff's pydocstyle rules: a fragment breaks one of {FRAGMENTS}; \
public things without one break one of {UNDOCUMENTED}.
"""


def main() -> None:
    asked = options(__doc__, tree=ROOT, **{"as": "now"})
    column = getattr(asked, "as")
    columns = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    columns[column] = measure(asked.tree.resolve())
    FIGURES.write_text(json.dumps(columns, indent=1) + "\n")
    FIGURES.with_suffix(".md").write_text(page(columns))
    print(json.dumps(columns[column], indent=1))


if __name__ == "__main__":
    main()
