"""docs/add_a_model.md and its tutorial: the example is a family that passes the gate, and its mistakes show as told."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from ptf import cli
from ptf.model import families
from ptf.model.scaffold import draft as drafts
from ptf.model.scaffold.reference import reference_of
from ptf.model.scaffold.report import next_steps
from ptf.model.verify import verify

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "add_a_model.md").read_text()
TUTORIAL = (DOCS / "tutorials" / "new_model_family.md").read_text()


def block(name: str) -> str:
    """The file of the tutorial with this name."""
    (found,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", TUTORIAL, re.DOTALL)
    return found


@pytest.fixture
def mixtral(monkeypatch):
    """A function that puts the example in its place, with some words of it replaced."""

    def place(*changes: tuple[str, str]) -> None:
        source = block("ptf/model/families/mixtral.py")
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        name = "ptf.model.families.mixtral"
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, None))  # type: ignore[arg-type]
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(families.MODULES, "mixtral", "mixtral")

    return place


def test_the_example_passes(mixtral):
    mixtral()
    report = verify("mixtral", configs=6)
    assert report.passed, report.cases


def test_swapped_projections_show_as_a_place(mixtral):
    mixtral(("w1.weight", "w0.weight"), ("w3.weight", "w1.weight"), ("w0.weight", "w3.weight"))
    (case,) = verify("mixtral", configs=1).cases
    assert not case.passed
    assert case.problems == ()
    assert case.findings[-1].place.startswith("layer 0, mlp")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("w2.weight", "w4.weight"), "missing: model.layers.0.block_sparse_moe.experts.0.w4.weight"),
        (("    *NORMS,\n", ""), "no tensor mapping for ['layers.0.attn_norm.weight'"),
        (('c["num_local_experts"]', 'c["num_experts"]'), "config.json has no num_experts"),
    ],
)
def test_what_cannot_be_compared_is_a_problem(mixtral, change, problem):
    mixtral(change)
    (case,) = verify("mixtral", configs=1).cases
    assert not case.passed
    assert any(problem in line for line in case.problems), case.problems


def test_the_example_is_what_the_scaffold_writes():
    """All but the docstring, which is completed."""
    drafted = drafts.draft(reference_of("mixtral")).text
    assert block("ptf/model/families/mixtral.py").split('"""')[2] == drafted.split('"""', 2)[2].split('"""')[0]


def test_the_job_of_the_example_runs(mixtral, tmp_path, monkeypatch, capfd):
    mixtral()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tutorial").mkdir()
    for name in ("tutorial/make_mixtral.py", "tutorial/mixtral.yaml"):
        (tmp_path / name).write_text(block(name))
    runpy.run_path("tutorial/make_mixtral.py")
    status = cli.main(["check", "--dry-run", "tutorial/mixtral.yaml"])
    assert status == 0, capfd.readouterr()


def test_the_checklist_is_what_the_scaffold_prints():
    table = REFERENCE[REFERENCE.index("## Checklist") :]
    root, steps = DOCS.parent, list(next_steps("NAME", "ptf/model/families/NAME.py"))
    assert len(steps) == len(re.findall(r"^\| `", table, re.MULTILINE))
    for step in steps:
        where, _, command = step.partition("; ")
        assert all(f"`{file}`" in table for file in where.partition(":")[0].split(", with")[0].split(", ")), step
        if (said := command or where.partition("; ")[2]).startswith(("pytest", "python")):
            assert f"`{said}`" in table
            assert (root / said.split()[1]).is_file()


def test_every_field_is_in_the_table():
    from dataclasses import fields

    from ptf.model.config import DecoderConfig, MoE

    table = REFERENCE[REFERENCE.index("| `DecoderConfig`") : REFERENCE.index("**The tensor mappings**")]
    of_a_job = {"head", "rows"}
    assert not [
        f.name
        for kind in (DecoderConfig, MoE)
        for f in fields(kind)
        if f"`{f.name}`" not in table and f.name not in of_a_job
    ]
