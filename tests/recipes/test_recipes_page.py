"""docs/recipes.md: its example trains."""

import re
import sys
from pathlib import Path

from tests.tiny import arithmetic
from tests.train.test_loop import facts, train

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def test_the_example_makes_what_rows_say_less_likely(tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "recipes_page.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    raw = arithmetic(tmp_path)
    start = train(raw, "start", train__steps=60)
    raw["model"] = {"path": str(start / "model")}
    raw |= {"recipe": {"use": "recipes_page:Unlikelihood"}, "algo": {"floor": 1e-7}}
    try:
        rows = facts(train(raw, "unlikely"))
    finally:
        sys.modules.pop("recipes_page", None)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
