"""docs/add_a_model.md and its tutorial: the example is a family that passes the gate and the tests of families, and its
mistakes show as told."""

import importlib.util
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ptf import cli
from ptf.model import families
from ptf.model.config import DecoderConfig, MoE
from ptf.model.verify import verify
from tests.model import test_family_defaults, test_random_configs

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "add_a_model.md").read_text()
TUTORIAL = (DOCS / "tutorials" / "new_model_family.md").read_text()


def block(name: str) -> str:
    """The file of the tutorial with this name."""
    (found,) = re.findall(rf"```\w+\n(# {re.escape(name)}\n.*?)```", TUTORIAL, re.DOTALL)
    return found


@pytest.fixture
def mixtral(monkeypatch):
    """A function that puts the example in its place, or another source, with some words of it replaced."""

    def place(*changes: tuple[str, str], source: str = block("ptf/model/families/mixtral.py")) -> None:
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
    assert [case for case in verify("mixtral", configs=6) if not case.passed] == []


def test_a_copy_of_the_nearest_family_says_what_differs(mixtral):
    mixtral(("qwen3_moe", "mixtral"), source=(Path(families.__file__).parent / "qwen3_moe.py").read_text())
    problems = next(verify("mixtral", configs=1)).problems
    assert "  missing: model.layers.0.mlp.experts.0.down_proj.weight" in problems
    assert "  unexpected: model.layers.0.block_sparse_moe.experts.0.w1.weight" in problems


def test_what_holds_of_the_settings_of_families_holds_of_the_example(mixtral):
    mixtral()
    test_family_defaults.test_a_setting_that_is_left_out_has_transformers_default("mixtral")
    test_random_configs.test_every_setting_that_the_mapping_reads_varies("mixtral")
    test_random_configs.test_a_setting_that_changes_the_model_is_read_or_refused("mixtral")


def test_swapped_projections_show_as_a_place(mixtral):
    mixtral(("w1.weight", "w0.weight"), ("w3.weight", "w1.weight"), ("w0.weight", "w3.weight"))
    (case,) = verify("mixtral", configs=1)
    assert not case.passed
    assert case.problems == ()
    assert case.findings[-1].place.startswith("layer 0, mlp")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("w2.weight", "w4.weight"), "missing: model.layers.0.block_sparse_moe.experts.0.w4.weight"),
        (("    *DENSE,\n", ""), "no tensor mapping for ['embed.weight'"),
        (('c["num_local_experts"]', 'c["num_experts"]'), "config.json has no num_experts"),
    ],
)
def test_what_cannot_be_compared_is_a_problem(mixtral, change, problem):
    mixtral(change)
    (case,) = verify("mixtral", configs=1)
    assert not case.passed
    assert any(problem in line for line in case.problems), case.problems


def test_the_job_of_the_example_runs(mixtral, tmp_path, monkeypatch, capfd):
    mixtral()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tutorial").mkdir()
    for name in ("tutorial/make_mixtral.py", "tutorial/mixtral.yaml"):
        (tmp_path / name).write_text(block(name))
    runpy.run_path("tutorial/make_mixtral.py")
    status = cli.main(["check", "--dry-run", "tutorial/mixtral.yaml"])
    assert status == 0, capfd.readouterr()


def test_what_the_checklist_names_exists():
    rows = re.findall(r"^\| (`.*) \|.*\|(.*)\|$", REFERENCE[REFERENCE.index("## Checklist") :], re.MULTILINE)
    assert len(rows) == 8
    files = [word for row in rows for word in re.findall(r"[\w./]+\.(?:py|md|jsonl)\b", " ".join(row))]
    assert len(files) > 10
    assert not [file for file in files if "NAME" not in file and not (DOCS.parent / file).is_file()]


def test_every_field_is_in_the_table():
    table = REFERENCE[REFERENCE.index("| `DecoderConfig`") : REFERENCE.index("**The tensor mappings**")]
    of_a_job = {"head", "rows"}
    assert not [
        f.name
        for kind in (DecoderConfig, MoE)
        for f in fields(kind)
        if f"`{f.name}`" not in table and f.name not in of_a_job
    ]
