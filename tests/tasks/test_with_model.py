import json

from ptf.data.tokenizer import Tokenizer
from ptf.tasks.with_model import prepare


def test_rows_and_a_model_that_reads_them(tmp_path) -> None:
    rows = {"use": "ptf.rl.environments.seeds:prepare", "args": {"train": 3, "test": 2}}
    prepare(str(tmp_path), rows=rows, answers=["[1]", "[2]"], max_length=256)
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "answers.txt").read_text() == "[1]\n[2]\n"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["hidden_size"]) == (256, 64)
    tokenizer = Tokenizer.load(str(tmp_path / "model"))
    text = "Guess: [1] or {2}?\n<red>S</red>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
