"""The sums of the calculator: all hundred, and held-out ones of every kind."""

import json

from ptf.tasks.tool_calculator import sums, write_sums


def test_training_and_held_out_sums_are_drawn_from_all_digits(tmp_path):
    assert sorted(sums()) == [(a, b) for a in range(10) for b in range(10)]
    assert sums() == sums()
    write_sums(tmp_path)
    rows = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test")}
    held_out = [json.loads(row)["messages"][0]["content"] for row in rows["test"]]
    assert (len(rows["train"]), len(held_out)) == (80, 20)
    assert not set(rows["train"]) & set(rows["test"])
    assert len({text[0] for text in held_out}) >= 7, "not the last rows of a table"
