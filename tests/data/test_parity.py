"""A handful of what benchmarks/tokenizer_parity.py does in full: what trains has the ids of what is published."""

import dataclasses
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ptf.data.tokenizer import Tokenizer
from tests.data.parity import compared, pairs, shared_data


@pytest.mark.long
def test_ids_are_autotokenizers(tmp_path: Path) -> None:
    for pair in pairs(tmp_path, shared_data(), once=True):
        found = compared(pair, 0, 50)
        assert (found["differ"], found["refused"]) == (0, 0), (pair.name, found["first"])
        assert found["with_added"] > 15 or not pair.more
        assert Tokenizer.load(str(tmp_path / "saved" / pair.name)).identity == pair.ours.identity, pair.name


@pytest.mark.parametrize("name", ["characters, semantic ids", "qwen3, added tokens and semantic ids"])
def test_a_difference_is_seen(tmp_path: Path, name: str) -> None:
    """Negative control: the tokenizer that was published has not the tokens that were added."""
    shared = shared_data()
    for pair in pairs(tmp_path, shared):
        if pair.name == name:
            without = (
                tmp_path / "characters" if shared is None or "qwen3" not in name else shared / "tokenizers" / "qwen3"
            )
            other = dataclasses.replace(pair, theirs=AutoTokenizer.from_pretrained(without, local_files_only=True))
            assert compared(other, 0, 50)["differ"] > 20
            return
    pytest.skip("the real tokenizers are not here (make data)")
