"""Ranks that each compute a part of every sequence find what one rank does, and a mistake in it shows."""

from functools import partial

import pytest

from tests.model.context import EXACT, FAMILIES, LAYOUTS, MISTAKES, PREFIX, Found, exact, made
from tests.model.ranks import on_processes


def judged(found: Found) -> None:
    for case, (loss, gradients) in found.items():
        print(*case, f"loss {loss:.1e} gradients {gradients:.1e}")
    right = {case: gap for case, gap in found.items() if case[1] not in MISTAKES}
    wrong = {case[1]: gap[1] for case, gap in found.items() if case[1] in MISTAKES}
    assert {case: gap for case, gap in right.items() if not all(one <= EXACT for one in gap)} == {}
    assert {name: gap for name, gap in wrong.items() if not gap > 1e-3} == {}


def test_two_ranks_find_what_one_does(tmp_path) -> None:
    directories = {family: made(tmp_path, family) for family in ("qwen3", "gemma2", "qwen3_5_text")}
    layouts = ["documents over every cut", "an uneven end, and padding", PREFIX]
    found, _ = on_processes(2, partial(exact, directories, 2, layouts), tmp_path)
    judged(found)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.cluster)])
def test_ranks_find_what_one_does(tmp_path, ranks) -> None:
    directories = {family: made(tmp_path, family) for family in FAMILIES}
    found, *_ = on_processes(ranks, partial(exact, directories, ranks, [*LAYOUTS, PREFIX]), tmp_path)
    judged(found)
    assert {name for _, name in found} >= {n for n, m in MISTAKES.items() if m.least <= ranks}
