"""The examples: the script and the notebook go from rows to a published model, each as its reader runs it."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ptf.storage import published_versions
from tests.child import run_python
from tests.conftest import ROOT
from tests.tiny import write_jsonl

EXAMPLES = ROOT / "examples"
SMALL = [
    "train.steps=2",
    "train.global_batch_sequences=1",
    "train.micro_batch_sequences=1",
    "data.validation.held_out.limit=4",
    "train.validate_every=1",
    "evaluate.limit=4",
]

# One process runs both, because imports are most of what either costs. Cells are run as Jupyter runs them: in one
# namespace, in the thread of a running event loop, and the value of a cell's last expression is its output.
RUN_BOTH = """
import ast, asyncio, json, runpy, sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
namespace, outputs = {"__name__": "__main__"}, {}


async def run_cell(cell):
    *statements, last = ast.parse(cell["source"]).body
    value = None
    if not isinstance(last, ast.Expr):
        statements.append(last)
    exec(compile(ast.Module(statements, []), cell["id"], "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), namespace)
    outputs[cell["id"]] = value._repr_svg_() if hasattr(value, "_repr_svg_") else repr(value)


async def run_notebook():
    for cell in json.load(open("cells.json")):
        await run_cell(cell)


asyncio.run(run_notebook())
json.dump(outputs, open("outputs.json", "w"))
"""


def cells() -> list[dict[str, Any]]:
    """Return the notebook's cells of code, with overrides that make the job small."""
    notebook = json.loads((EXAMPLES / "first_sft.ipynb").read_text())
    found = [{"id": cell["id"], "source": "".join(cell["source"])} for cell in notebook["cells"] if is_code(cell)]
    place = "overrides = []"
    assert sum(cell["source"].count(place) for cell in found) == 1
    return [{**cell, "source": cell["source"].replace(place, f"overrides = {SMALL}")} for cell in found]


def is_code(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] == "code"


def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", EXAMPLES / "curves.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["curves"] = module  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.e2e
def test_script_and_notebook_go_from_rows_to_a_published_model(tmp_path: Path) -> None:
    for file in EXAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / "cells.json").write_text(json.dumps(cells()))
    changes = [word for change in SMALL for word in ("--set", change)]
    done = run_python("-c", RUN_BOTH, "first_sft.py", "--output", "script", *changes, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"right responses to held-out questions: \d+%\n12\+30= .*\n7\+8= .*\n", done.stdout)
    assert published_versions.latest(str(tmp_path / "script" / "runs" / "published"))
    assert published_versions.latest(str(tmp_path / "runs" / "first_sft" / "runs" / "published"))
    outputs = json.loads((tmp_path / "outputs.json").read_text())
    assert outputs["curves"].count("<polyline") == 2
    assert "loss/held_out" in outputs["curves"]
    assert isinstance(eval(outputs["chat"]), str)


def test_curves_pass_through_the_values_of_their_columns(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write_jsonl(file, [{"step": 1, "a": 4.0}, {"step": 3, "a": 2.0, "b": 3.0}])
    module = curves()
    picture = module.Curves.of(file, ["a", "b"])
    assert picture.points == {"a": [(1, 4.0), (3, 2.0)], "b": [(3, 3.0)]}
    left, right, top, base = module.LEFT, module.RIGHT, module.TOP, module.BASE
    assert f'points="{left:.1f},{top:.1f} {right:.1f},{base:.1f}"' in picture._repr_svg_()
    with pytest.raises(ValueError, match=r"has no values of c; it has a, b, step"):
        module.Curves.of(file, ["a", "c"])
