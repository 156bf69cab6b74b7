"""Held-out prompts: the first ones of a source, and a word about the others."""

import json
from pathlib import Path

import pytest

from ptf.config.sections.data import Source
from ptf.data.character_tokenizer import character_tokenizer
from ptf.rl.prompts import held_out_prompts


@pytest.mark.parametrize(("rows", "said"), [(3, ""), (4, "the first 3 prompts of a are measured; it has more")])
@pytest.mark.parametrize("bad", [False, True])
def test_a_source_that_has_more_prompts_than_are_measured_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int, said: str, bad: bool
) -> None:
    lines = [json.dumps({"prompt": str(i) if i < 3 or not bad else i, "answer": "1"}) for i in range(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = Source(path=str(tmp_path / "a.jsonl"), kind="prompt")
    found = held_out_prompts({"a": source}, character_tokenizer("0123456789", tmp_path / "t"), 3)
    assert [len(prompts) for prompts in found.values()] == [3]
    text = capsys.readouterr().out
    assert (said in text) if said else not text
