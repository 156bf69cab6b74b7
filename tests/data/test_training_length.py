"""The passes and steps that are predicted before a run are those of the run; a predicted interval contains them."""

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ptf.data import tokenized, training_length
from ptf.data.encode import encode_document
from ptf.data.partitions import Partitions
from ptf.data.sources.rows import SourceSpec
from ptf.data.token_file import TokenRows
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import estimated, planned
from tests.tiny import write_jsonl

ROWS, SIZES = 4, {"a": 90, "b": 40}
MIXTURES: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 2.0},
    "weights": {"weights": (2.0, None)},
    "tokens": {"weights": (1.0, 1.0), "by": "tokens"},
    "drop": {"weights": (3.0, 1.0), "exhausted": "drop"},
    "stop": {"weights": (1.0, 1.0), "exhausted": "stop"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("passes")
    for name, n in SIZES.items():
        write_jsonl(root / f"{name}.jsonl", [{"text": name + "x" * (i * i % 23)} for i in range(n)])
    return root


def partitions_of(
    files: Path,
    tokenizer: Tokenizer,
    epochs: int | None,
    weights: tuple[float | None, float | None] = (None, None),
    **options: Any,
) -> Partitions:
    sources = {
        name: SourceSpec(str(files / f"{name}.jsonl"), weight, epochs=epochs)
        for name, weight in zip(SIZES, weights, strict=True)
    }

    def encode(row, name):
        return encode_document(row, tokenizer, name)

    return Partitions(sources, tokenizer, encode, partitions=4, seed=3, shuffle=16, seq_len=64, lookahead=8, **options)


def trained(partitions: Partitions, sequences: int | None) -> tuple[int, dict[str, float]]:
    """Steps, and passes over each source, of a run of so many packed sequences, or of one that ends."""
    seen: Counter[str] = Counter()
    ends = 0
    for partition in range(partitions.partitions):
        for k, sequence in enumerate(partitions(partition)):
            if sequences is not None and partition + k * partitions.partitions >= sequences:
                break
            ends = max(ends, partition + k * partitions.partitions + 1)
            seen.update(sample.source for (sample,) in sequence)
    return -(-ends // ROWS), {name: seen[name] / n for name, n in SIZES.items()}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize(("epochs", "steps"), [(2, None), (None, 30), (1, 5)])
def test_what_is_said_is_what_is_trained(
    files: Path, characters: Tokenizer, mixture: str, epochs: int | None, steps: int | None
) -> None:
    if mixture in ("drop", "stop") and epochs is None:
        epochs = 9
    options = MIXTURES[mixture]
    plan = planned(partitions_of(files, characters, epochs, **options), ROWS, steps)
    ends, found = trained(partitions_of(files, characters, epochs, **options), None if steps is None else steps * ROWS)
    assert plan.exact
    assert plan.steps == (ends, ends)
    assert plan.passes == {name: (pytest.approx(n), pytest.approx(n)) for name, n in found.items()}
    if mixture in ("none", "temperature", "drop") and steps is None:
        assert found == {"a": epochs, "b": epochs}
    rough = estimated(partitions_of(files, characters, epochs, **options), ROWS, steps)
    assert not rough.exact
    assert (
        rough.steps[0] * 0.9 - 2 <= ends <= rough.steps[1] * 1.1 + 2
    )  # the partitions' windows run dry in so small a set
    for name, n in found.items():
        low, high = rough.passes[name]  # type: ignore[misc]
        assert low * 0.85 <= n <= high * 1.15


@pytest.mark.parametrize("few", [training_length.FEW_ROWS, 10])
def test_rows_of_compressed_files_are_counted_or_estimated(
    files: Path, characters: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Their files do not tell how many rows they have; the run that ends with them is told all the same."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((files / "a.jsonl").read_bytes()))

    def encode(row, name):
        return encode_document(row, characters, name)

    sources = {"a": SourceSpec(str(tmp_path / "a.jsonl.gz"), epochs=2)}
    partitions = Partitions(sources, characters, encode, partitions=4, seed=3, shuffle=16, seq_len=64, lookahead=8)
    ends, found = trained(partitions, None)
    monkeypatch.setattr(training_length, "FEW_ROWS", few)
    plan = planned(partitions, ROWS, None)
    low, high = plan.passes["a"]  # type: ignore[misc]
    if few > SIZES["a"]:
        assert plan.exact
        assert plan.steps == (ends, ends)
        assert low == high == pytest.approx(found["a"])
    else:
        assert not plan.exact
        assert plan.steps[0] * 0.9 - 2 <= ends <= plan.steps[1] * 1.1 + 2
        assert low * 0.85 <= found["a"] <= high * 1.15


def test_only_the_lengths_of_what_is_tokenized_are_read(
    files: Path, characters: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(row, name):
        return encode_document(row, characters, name)

    options: dict[str, Any] = {
        "encode": encode,
        "seq_len": 64,
        "too_long": "error",
        "tokenizer": characters,
        "config_fingerprint": "c",
    }
    tokenized.write(str(tmp_path / "t"), SourceSpec(str(files / "a.jsonl")), "a", **options)
    sources = {"a": SourceSpec(str(tmp_path / "t"), kind="tokenized", epochs=2)}
    partitions = Partitions(sources, characters, encode, partitions=4, seed=3, shuffle=16, seq_len=64, lookahead=8)
    steps, found = trained(partitions, None)
    monkeypatch.setattr(TokenRows, "__init__", lambda self, table: pytest.fail("tokens were read"))
    plan = planned(partitions, ROWS, None)
    assert (plan.steps, plan.passes, plan.exact) == ((steps, steps), {"a": (2.0, 2.0)}, True)
    assert found["a"] == 2
    monkeypatch.setattr(training_length, "FEW_ROWS", 0)
    assert planned(partitions, ROWS, None).exact


def test_an_interval_where_too_much_would_be_encoded(
    files: Path, characters: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_length, "FEW_ROWS", 100)
    partitions = partitions_of(files, characters, 1)
    plan = planned(partitions, ROWS, None)
    assert not plan.exact
    assert plan.steps[0] < plan.steps[1]
    assert plan.passes == {"a": (1.0, 1.0), "b": (1.0, 1.0)}
    assert "passes over the data: a 1, b 1; steps: " in plan.describe()
    assert plan.describe().endswith("(estimated)")
    assert planned(partitions, ROWS, None, exact=True).exact
