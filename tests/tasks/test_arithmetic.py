import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ptf.data.encode import encode_document, encode_prompt
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.tasks.arithmetic import exact, prepare
from tests.tiny import read_jsonl


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("arithmetic")
    prepare(str(root))
    return root


def pairs(path: Path) -> set[frozenset[int]]:
    return {frozenset(map(int, re.findall(r"\d+", row["messages"][0]["content"]))) for row in read_jsonl(path)}


def test_no_tested_pair_is_trained_on_in_either_order(task: Path) -> None:
    trained = pairs(task / "train.jsonl") | pairs(task / "train_prompts.jsonl")
    dev, test = pairs(task / "dev.jsonl"), pairs(task / "test.jsonl")
    assert not trained & dev
    assert not trained & test
    assert not dev & test
    assert len(read_jsonl(task / "dev.jsonl")) == len(read_jsonl(task / "test.jsonl")) == 500
    assert pairs(task / "held_out_chat.jsonl") == dev


def test_answers_are_right(task: Path) -> None:
    for row in read_jsonl(task / "train.jsonl"):
        question, answer = (m["content"] for m in row["messages"])
        assert eval(question.rstrip("=")) == int(answer)
    for name in ("train_prompts", "dev", "test"):
        for row in read_jsonl(task / f"{name}.jsonl"):
            assert eval(row["messages"][0]["content"].rstrip("=")) == int(row["answer"])


@pytest.mark.long
def test_the_model_directory_is_one_of_hugging_face(task: Path) -> None:
    tokenizer = Tokenizer.load(str(task / "model"))
    config = AutoConfig.from_pretrained(task / "model")
    model = AutoModelForCausalLM.from_config(config)
    assert 550_000 < sum(p.numel() for p in model.parameters()) < 650_000
    assert tokenizer.vocab_size <= config.vocab_size < tokenizer.vocab_size + 8
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.stop_ids[0], tokenizer.pad_id)
    assert config.eos_token_id != config.pad_token_id
    longest = max(len(encode_document(row, tokenizer)[0][0]) for row in read_jsonl(task / "train.jsonl"))
    assert longest <= config.max_position_embeddings
    encode_prompt(read_jsonl(task / "test.jsonl")[0], tokenizer, "test", 0)


def test_the_same_seed_makes_the_same_files(task: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        prepare(str(tmp_path / str(seed)), seed=seed)
    assert (tmp_path / "0/train.jsonl").read_bytes() == (task / "train.jsonl").read_bytes()
    assert (tmp_path / "1/train.jsonl").read_bytes() != (task / "train.jsonl").read_bytes()


def test_shuffled_answers_are_the_same_answers_elsewhere(task: Path, tmp_path: Path) -> None:
    prepare(str(tmp_path), shuffle_answers=True)
    right, wrong = (read_jsonl(root / "train_prompts.jsonl") for root in (task, tmp_path))
    assert [r["messages"] for r in right] == [w["messages"] for w in wrong]
    assert sorted(r["answer"] for r in right) == sorted(w["answer"] for w in wrong)
    assert sum(r["answer"] == w["answer"] for r, w in zip(right, wrong, strict=True)) < 0.05 * len(right)
    assert (tmp_path / "test.jsonl").read_bytes() == (task / "test.jsonl").read_bytes()


def test_sizes(tmp_path: Path) -> None:
    prepare(str(tmp_path), high=20, train=100, held_out=10)
    assert [len(read_jsonl(tmp_path / f"{name}.jsonl")) for name in ("train", "dev", "test")] == [100, 10, 10]
    with pytest.raises(UserError, match="raise `high`"):
        prepare(str(tmp_path), high=5)


def test_exact() -> None:
    row = {"answer": "19"}
    assert [exact(row, text) for text in ("19", " 19\n", "19.0", "", "119")] == [1.0, 1.0, 0.0, 0.0, 0.0]
