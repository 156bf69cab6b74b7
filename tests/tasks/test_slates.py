"""What a business makes of a slate, and a user's future that is played."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptf.errors import UserError
from ptf.events.catalogue import Catalogue, Item
from ptf.tasks.slates import Future, invalid, part, revenue, worth


@pytest.fixture
def catalogue(tmp_path: Path) -> str:
    items = tuple(Item(f"n{i}", f"<i_{i}>", value=float(i + 1), popularity=0.5 ** (i + 1)) for i in range(4))
    Catalogue(items, "f").save(str(tmp_path / "catalogue.json"))
    np.save(tmp_path / "vectors.npy", np.eye(4)[[0, 0, 1, 2]])
    return str(tmp_path / "catalogue.json")


def test_revenue_counts_what_was_bought_by_what_it_is_worth_once(catalogue: str) -> None:
    settings: dict[str, Any] = {"catalogue": catalogue, "size": 4, "diversity": 0.0, "novelty": 0.0}
    assert worth("<i_3><i_0>", ["n3", "n1"], **settings)["reward"] == pytest.approx(4 / 6)
    assert worth("<i_3><i_3><i_3>", ["n3", "n1"], **settings)["reward"] == pytest.approx(4 / 6), (
        "the same thing four times is one thing"
    )
    assert worth("<i_9><i_3>", ["n3"], **settings)["distinct"] == 0.25
    assert worth("", ["n3"], **settings)["reward"] == 0
    for first in ("<i_9><i_9>", "<i_0><i_0>"):  # what names nothing, or the same again, has its place
        assert worth(f"{first}<i_3>", ["n3"], **{**settings, "size": 2})["revenue"] == 0
    with pytest.raises(UserError, match="'n9' was bought, but is not in"):
        worth("<i_0>", ["n9"], **settings)
    assert worth("<i_0><i_1><i_2><i_0><i_3>", ["n3"], **{**settings, "size": 3})["reward"] == 0, (
        "it is behind the last place"
    )


def test_diversity_and_novelty_are_of_the_whole_slate(catalogue: str) -> None:
    same, other = (worth(text, ["n3"], catalogue=catalogue, size=2) for text in ("<i_0><i_1>", "<i_0><i_2>"))
    assert (same["diversity"], other["diversity"]) == (pytest.approx(0), pytest.approx(1))
    assert other["novelty"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert worth("<i_2>", ["n3"], catalogue=catalogue, size=2)["novelty"] == pytest.approx(3 / 8), (
        "an empty place is not new"
    )
    assert other["reward"] == pytest.approx(0.1 + 0.1 * other["novelty"])
    row = {"future": [["n3"], ["n0"]]}
    assert revenue(row, "<i_3>", catalogue=catalogue, size=1, novelty=0.0) == 1.0


def test_a_future_is_played_basket_by_basket(catalogue: str) -> None:
    row = {
        "messages": [{"role": "user", "content": "<start><i_0><gap_0>"}],
        "future": [["n3"], ["n1"], ["n2"]],
        "told": ["<i_3><gap_1>", "<i_1><gap_2>", "-"],
    }
    env = Future(row, 0, catalogue=catalogue, turns=2, size=1, novelty=0.0)
    assert env.reset() == row["messages"]
    first = env.step("<i_3><end>")
    assert (first.reward, first.done) == (1.0, False)
    assert first.environment_messages == [{"role": "user", "content": "<i_3><gap_1>"}]
    last = env.step("<i_3>")
    assert (last.reward, last.done) == (0.0, True)


def test_metrics_of_answers(catalogue: str) -> None:
    answers = [
        {"response": "<i_3><i_9>", "row": {"future": [["n3"]]}},
        {"response": "<i_0><i_1>", "row": {"future": [["n3"]]}},
    ]
    assert invalid(answers, catalogue=catalogue) == 0.25
    assert part(answers, of="revenue", catalogue=catalogue, size=2) == 0.5
    assert json.loads(Path(catalogue).read_text())["tokenizer"] == "f"


def test_a_future_has_three_turns_where_no_number_is_given(catalogue: str) -> None:
    row = {"messages": [], "future": [["n3"]] * 5, "told": ["<i_3><gap_1>"] * 5}
    env = Future(row, 0, catalogue=catalogue, size=1, novelty=0.0)
    assert [env.step("<i_3>").done for _ in range(3)] == [False, False, True]
