import os
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.encode import encode_document
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.tasks.gsm8k_steps import decimal, generate, numeric, prepare, steps
from tests.tiny import read_jsonl

SHARED = Path(os.environ.get("PTF_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (SHARED / "gsm8k").is_dir():
        pytest.skip("needs the real data: `make data` fetches it, or point PTF_DATA at it")
    root = tmp_path_factory.mktemp("gsm8k_steps")
    prepare(str(root), data=str(SHARED), generated=3000)
    return root


def questions(path: Path) -> set[str]:
    return {row["messages"][0]["content"] for row in read_jsonl(path)}


def test_counts(task: Path) -> None:
    known = steps(SHARED / "gsm8k/train.jsonl")
    assert len(known) == len(set(known)) == 11021
    assert len({question for question, _ in known}) == 10772
    assert len(read_jsonl(task / "dev.jsonl")) == len(questions(task / "dev.jsonl")) == 500
    assert len(read_jsonl(task / "test.jsonl")) == len(questions(task / "test.jsonl")) == 878
    assert len(read_jsonl(task / "train.jsonl")) == len(read_jsonl(task / "train_prompts.jsonl")) + 3000
    assert questions(task / "train_prompts.jsonl") | questions(task / "dev.jsonl") == {
        question for question, _ in known
    }


def test_nothing_tested_is_trained_on(task: Path) -> None:
    trained = questions(task / "train.jsonl") | questions(task / "train_prompts.jsonl")
    assert not trained & questions(task / "test.jsonl")
    assert not trained & questions(task / "dev.jsonl")
    assert not questions(task / "dev.jsonl") & questions(task / "test.jsonl")


def test_answers_are_right_and_encodable(task: Path) -> None:
    tokenizer = Tokenizer.load(str(task / "model"))
    for row in read_jsonl(task / "train.jsonl"):
        question, answer = (m["content"] for m in row["messages"])
        assert abs(eval(question.rstrip("=")) - float(answer)) < 1e-6
    for row in read_jsonl(task / "train.jsonl")[:500]:
        assert len(encode_document(row, tokenizer)[0][0]) <= 128


def test_without_data_it_says_where_to_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTF_DATA", str(tmp_path))
    with pytest.raises(UserError, match="set PTF_DATA"):
        prepare(str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@given(st.integers(0, 10**6))
def test_generated_expressions_have_the_shape_of_real_ones(seed: int) -> None:
    patterns = ["48/2=", "12*.5=", "1.25*8-3=", "(4+6)*2="]
    avoid = {"48/3=", "(4+6)*2="}
    made = generate(patterns, 5, random.Random(seed), avoid)
    assert len(dict(made)) == 5
    shapes = {"".join("#" if c.isdigit() else c for c in p) for p in patterns}
    for question, answer in made:
        assert question not in avoid
        assert "".join("#" if c.isdigit() else c for c in question) in shapes
        assert not re.search(r"(?<![\d.])0\d", question), "no number of the patterns begins with a zero"
        assert Fraction(answer) == Fraction(eval(question.rstrip("="))).limit_denominator(10**6)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("1/4", "0.25"),
        (".5*3", "1.5"),
        ("100-0.1-0.9", "99"),
        ("1/8", None),
        ("1/3", None),
        ("3-5", None),
        ("1/0", None),
        ("7//2", None),
        ("05+1", None),
    ],
)
def test_decimal(expression: str, value: str | None) -> None:
    assert decimal(expression) == value


def test_numeric() -> None:
    given = ("0.50", ".5", " 0.5\n", "5", "", "half", "1/0")
    assert [numeric({"answer": "0.5"}, text) for text in given] == [1.0] * 3 + [0.0] * 4
