"""The logit verifier passes every family, and catches every seeded mistake."""

import json

import pytest

from ptf.errors import UserError
from ptf.model.families import MODULES
from ptf.model.verify import as_json, verify
from tests.model.mistakes import MISTAKES, Mistake


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODULES)
def test_family_equals_transformers(model_type: str) -> None:
    report = verify(model_type, configs=12)
    failures = [
        (c.logits, c.gradients, c.worst_gradient, c.diverges, c.problems, c.config)
        for c in report.cases
        if not c.passed
    ]
    assert len(report.cases) == 12
    assert not failures


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.model_type}: {m.name}")
def test_mistake_is_caught(mistake: Mistake) -> None:
    with mistake.made():
        report = verify(mistake.model_type, configs=12, change=mistake.model, until_failure=True)
    assert not report.passed
    case = report.cases[-1]
    assert case.problems or case.diverges or case.gradients > 1e-5


def test_the_place_of_a_mistake_is_named() -> None:
    def change(model) -> None:
        model.layers[1].attn.o_proj.weight.data[0] += 1

    report = verify("llama", configs=1, change=change)
    assert report.cases[0].diverges.startswith("layer 1, attention")
    assert json.loads(as_json(report))["passed"] is False


def test_what_is_neither_family_nor_directory_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="neither a directory"):
        verify(str(tmp_path))
