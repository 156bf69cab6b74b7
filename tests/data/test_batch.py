"""Sequences as tensors: laid out together they are what a plain loop over documents makes of each."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.batch import Batch, lay_out, moved
from ptf.data.document import Document, PackUnit

SEQ_LEN = 24


def plain(sequences: list[list[PackUnit]]) -> dict[str, Any]:
    """A document at a time, a token at a time."""
    shape = len(sequences), SEQ_LEN
    made: dict[str, Any] = {name: np.zeros(shape, np.int64) for name in ("tokens", "targets", "positions")}
    made |= {
        "segments": np.full(shape, -1),
        "loss_weights": np.zeros(shape, np.float32),
        "score": np.zeros(shape, np.float32),
        "units": [],
    }
    document = unit = -1
    for r, sequence in enumerate(sequences):
        at = 0
        for members in sequence:
            unit += 1
            for sample in members:
                document += 1
                made["units"].append(unit)
                for i, token in enumerate(sample.tokens):
                    made["tokens"][r, at], made["positions"][r, at], made["segments"][r, at] = (
                        token,
                        sample.prefix_length + i,
                        document,
                    )
                    if i + 1 < len(sample):
                        made["targets"][r, at], made["loss_weights"][r, at] = (
                            sample.tokens[i + 1],
                            sample.loss_weights[i + 1],
                        )
                        made["score"][r, at] = (
                            sample.token_columns["score"][i + 1] if "score" in sample.token_columns else 0
                        )
                    at += 1
    return made


@st.composite
def packed(draw: Any) -> list[list[PackUnit]]:
    rng, token_columns = np.random.default_rng(draw(st.integers(0, 1000))), draw(st.booleans())
    sequences = []
    for lengths in draw(
        st.lists(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=4), min_size=1, max_size=7)
    ):
        sequence: list[PackUnit] = []
        room = SEQ_LEN
        for unit in lengths:
            if sum(unit) <= room:
                room -= sum(unit)
                documents = []
                for i, n in enumerate(unit):
                    tokens, weights = rng.integers(1, 99, n).astype(np.int32), rng.normal(size=n).astype(np.float32)
                    columns = {"score": rng.normal(size=n).astype(np.float32)} if token_columns and n % 2 else {}
                    shared = int(i and rng.integers(0, 3))
                    documents.append(Document(tokens, weights, str(n), columns, prefix_length=shared))
                sequence.append(tuple(documents))
        sequences.append(sequence)
    return sequences


@settings(deadline=None)
@given(sequences=packed(), micro_batch_sequences=st.integers(1, 8))
def test_sequences_laid_out_together_are_what_a_plain_loop_makes_of_each(
    sequences: list[list[PackUnit]], micro_batch_sequences: int
) -> None:
    parts = [sequences[i : i + micro_batch_sequences] for i in range(0, len(sequences), micro_batch_sequences)]
    for batch, part in zip(lay_out(sequences, SEQ_LEN, micro_batch_sequences), parts, strict=True):
        wanted, samples = plain(part), [sample for sequence in part for unit in sequence for sample in unit]
        for name in ("tokens", "targets", "positions", "segments", "loss_weights"):
            assert np.array_equal(getattr(batch, name).numpy(), wanted[name]), name
        assert batch.units.tolist() == wanted["units"]
        assert np.array_equal(
            batch.token_columns["score"].numpy() if batch.token_columns else np.zeros(batch.tokens.shape, np.float32),
            wanted["score"],
        )
        told = zip(batch.lengths, batch.prefix_lengths, batch.sources, strict=True)
        assert list(told) == [(len(sample), sample.prefix_length, sample.source) for sample in samples]
        assert torch.equal(Batch.of(part, SEQ_LEN).tokens, batch.tokens)


@pytest.mark.parametrize(
    ("device", "pinned", "wanted"),
    [("cuda", False, ["pin", "copy"]), ("cuda", True, ["copy"]), ("cpu", False, ["copy"])],
)
def test_a_gpu_copies_from_page_locked_memory(device: str, pinned: bool, wanted: list[str]) -> None:
    done: list[str] = []

    class Host:
        def is_pinned(self) -> bool:
            return pinned

        def pin_memory(self) -> "Host":
            done.append("pin")
            return self

        def to(self, where: torch.device, non_blocking: bool) -> "Host":
            assert (where.type, non_blocking) == (device, True)
            done.append("copy")
            return self

    moved(Host(), torch.device(device))  # type: ignore[arg-type]
    assert done == wanted
