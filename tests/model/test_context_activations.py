"""Ranks that divide sequences keep their share of the activations, and what is made again is the same."""

from dataclasses import replace
from typing import Any

import pytest

from ptf.config.sections.compute import MeshSizes
from ptf.model import context_parallel
from ptf.model.context_parallel import ContextAttend
from tests.model.activations import kept
from tests.model.parallel import Case, checkpoint, difference, on_ranks

SLACK = 0.02


def share(mode: Any, ranks: int, kv: int = 8) -> float:
    one, part = (kept("Qwen3-8B", 2048, n, mode, kv) for n in (1, ranks))
    return part / one


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_a_rank_keeps_its_share(mode) -> None:
    for ranks in (2, 4):
        assert 1 / ranks - 0.001 <= share(mode, ranks) <= 1 / ranks + SLACK


class Opaque:
    """The negative control: attention whose exchange is not seen."""

    def __init__(self, *of: Any) -> None:
        self.attend = ContextAttend(*of)

    def __call__(self, *inputs: Any) -> Any:
        return self.attend(*inputs)


def test_an_output_that_is_kept_before_and_after_its_exchange_shows(monkeypatch) -> None:
    monkeypatch.setattr(context_parallel, "ContextAttend", Opaque)
    assert share("selective", 2) > 0.5 + SLACK


@pytest.mark.cluster
def test_what_is_made_again_on_ranks_is_the_same(tmp_path) -> None:
    case = Case(checkpoint(tmp_path / "model", "gpt_oss"), MeshSizes(context=2), steps=1)
    plain, *others = on_ranks(
        2, [replace(case, recomputed=how) for how in ("none", "block", "selective")], tmp_path / "ranks"
    )
    assert [difference(plain, one) for one in others] == [(0, 0), (0, 0)]
