import datetime
import pickle
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.prompts import Prompts, prompts_once
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.tiny import write_jsonl


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceSpec]:
    root = tmp_path_factory.mktemp("prompts")
    write_jsonl(root / "a.jsonl", [{"prompt": f"a{i}", "answer": None, "n": [i]} for i in range(20)])
    pq.write_table(
        pa.Table.from_pylist([{"prompt": f"b{i}", "day": datetime.date(2024, 1, 1 + i)} for i in range(10)]),
        root / "b.parquet",
    )
    return {
        "a": SourceSpec(str(root / "a.jsonl"), 3.0, "prompt"),
        "b": SourceSpec(str(root / "b.parquet"), 1.0, "prompt"),
    }


def take(stream: Prompts, n: int) -> list[tuple]:
    return [(p.tokens.tolist(), p.row, p.source, p.index) for p in (next(stream) for _ in range(n))]


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_prompts_resume_anywhere(sources: dict[str, SourceSpec], characters: Tokenizer, cuts: list[int]) -> None:
    whole = take(Prompts(sources, tokenizer=characters, seed=0, shuffle=7), sum(cuts) + 10)
    stream, parts = Prompts(sources, tokenizer=characters, seed=0, shuffle=7), []
    for cut in [*cuts, 10]:
        parts += take(stream, cut)
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        stream = Prompts(sources, tokenizer=characters, seed=0, shuffle=7)
        stream.load_state_dict(state)
    assert parts == whole


def test_a_state_of_another_order_is_refused(sources: dict[str, SourceSpec], characters: Tokenizer) -> None:
    stream = Prompts(sources, tokenizer=characters, seed=0, shuffle=7)
    state = stream.state_dict()
    stream.load_state_dict(state)
    with pytest.raises(UserError, match="read the data in another order"):
        stream.load_state_dict({**state, "order": "another"})


def test_prompts_are_mixed_shuffled_numbered_and_whole(sources: dict[str, SourceSpec], characters: Tokenizer) -> None:
    prompts = take(Prompts(sources, tokenizer=characters, seed=0, shuffle=1000), 40)
    assert Counter(source for _, _, source, _ in prompts) == {"a": 30, "b": 10}
    assert [index for *_, index in prompts] == list(range(40))
    order = [row["prompt"] for _, row, source, _ in prompts if source == "a"]
    assert len(set(order[:20])) == 20  # an epoch
    assert order[:20] != sorted(order[:20])
    assert order != [
        row["prompt"]
        for _, row, source, _ in take(Prompts(sources, tokenizer=characters, seed=1, shuffle=1000), 40)
        if source == "a"
    ]
    row = next(row for _, row, _, _ in prompts if row["prompt"] == "a7")
    assert row == {"prompt": "a7", "answer": None, "n": [7]}


def test_one_pass_of_prompts(sources: dict[str, SourceSpec], characters: Tokenizer) -> None:
    prompts = list(prompts_once(sources["a"], "a", characters))
    assert [p.row["prompt"] for p in prompts] == [f"a{i}" for i in range(20)]
    assert [p.index for p in prompts] == list(range(20))


def test_a_bad_prompt_is_named(characters: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n{"prompt": 1}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(source sums\): a prompt row needs"):
        list(prompts_once(SourceSpec(str(tmp_path / "a.jsonl")), "sums", characters))
    stream = Prompts({"sums": SourceSpec(str(tmp_path / "a.jsonl"))}, tokenizer=characters, seed=0, shuffle=0)
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(source sums\)"):
        take(stream, 2)
