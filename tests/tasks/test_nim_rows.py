"""The rows of the game of self-play: each pile, seen by either side."""

import json

from ptf.tasks.nim import PILES, prepare


def test_every_pile_is_asked_of_either_side(tmp_path):
    prepare(str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "games.jsonl").read_text().splitlines()]
    assert {(row["pile"], row["side"]) for row in rows} == {(pile, side) for pile in PILES for side in (0, 1)}
    assert all(row["messages"] == [{"role": "user", "content": str(row["pile"])}] for row in rows)
