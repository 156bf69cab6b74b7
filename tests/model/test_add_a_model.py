"""docs/add_a_model.md and its tutorial: the example is a family that passes the gate, and its mistakes show as told."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ptf.model import families
from ptf.model.verify import verify

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "add_a_model.md").read_text()
TUTORIAL = (DOCS / "tutorials" / "new_model_family.md").read_text()


@pytest.fixture
def mixtral(monkeypatch):
    """A function that puts the example in its place, with some words of it replaced."""

    def place(*changes: tuple[str, str]) -> None:
        (source,) = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
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
    assert report.passed, [(c.logits, c.gradients, c.problems) for c in report.cases]


def test_swapped_projections_show_as_a_place(mixtral):
    mixtral(('"gate": "w1"', '"gate": "w3"'), ('"up": "w3"', '"up": "w1"'))
    (case,) = verify("mixtral", configs=1).cases
    assert not case.passed
    assert case.problems == ()
    assert case.diverges.startswith("layer 0, mlp")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('"down": "w2"', '"down": "w4"'), "missing: model.layers.0.block_sparse_moe.experts.0.w4.weight"),
        (("    *NORMS,\n", ""), "no tensor mapping for ['layers.0.attn_norm.weight'"),
        (('c["num_local_experts"]', 'c["num_experts"]'), "config.json has no num_experts"),
    ],
)
def test_what_cannot_be_compared_is_a_problem(mixtral, change, problem):
    mixtral(change)
    (case,) = verify("mixtral", configs=1).cases
    assert not case.passed
    assert any(problem in line for line in case.problems), case.problems


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
