"""benchmarks/verify.py --only: rows of some families come into the page, and nothing else of it changes."""

import re

from benchmarks.verify import PAGE, SINCE, with_rows

OTHER = "| {} | 50 / 50 | 1.0e-06 | 1.0e-06 | 1.0e-06 | 1.0e-06 | 1.0e-06 | 1.0e-06 | 7 / 7 |"


def test_rows_are_replaced_and_added_and_the_rest_stays() -> None:
    before = re.sub(rf"\n{SINCE}.*\n", "", PAGE.read_text())
    olmo2 = next(line for line in before.splitlines() if line.startswith("| olmo2 |"))
    once = with_rows(before, {"olmo2": OTHER.format("olmo2"), "novel": OTHER.format("novel")}, "day 1, commit a")
    assert f"{SINCE}olmo2 (day 1, commit a); novel (day 1, commit a)." in once
    changed = set(once.splitlines()) - set(before.splitlines())
    total = int(re.findall(r"the (\d+) of `tests", before)[0]) - int(olmo2.split("/")[-1].strip(" |")) + 14
    assert f"caught: {total} of {total}, each" in once
    assert f"the {total} of `tests/model/mistakes.py`" in once
    assert len(changed) == 5  # two rows, when they were measured, two lines with the number of mistakes
    assert set(before.splitlines()) - set(once.splitlines()) >= {olmo2}
    assert len(once.splitlines()) == len(before.splitlines()) + 3  # a row, a line and the empty one before it
    table = [line.split("|")[1].strip() for line in once.splitlines() if line.startswith("| ")]
    assert table[-1] == "novel"
    assert table.index("olmo2") == [x.split("|")[1].strip() for x in before.splitlines() if x[:2] == "| "].index(
        "olmo2"
    )
    again = with_rows(once, {"olmo2": olmo2}, "day 2, commit b")
    assert f"{SINCE}olmo2 (day 2, commit b); novel (day 1, commit a)." in again
    assert olmo2 in again
    assert again.count(SINCE) == 1
    assert len(again.splitlines()) == len(once.splitlines())
