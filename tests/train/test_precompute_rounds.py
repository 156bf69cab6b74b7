"""The rows that frozen models compute at a time: all up to the limit, in rounds that end with their block."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.data.document import Document
from ptf.meshes import Meshes
from ptf.train import precompute


def test_row_groups_end_where_the_rows_say_whatever_the_number_of_workers(monkeypatch, tmp_path):
    """Blocks are permuted, so where they end is part of the order of the data."""
    block = [[(Document(np.full(n, 7, np.int32), np.ones(n, np.float32)),)] for n in range(1, 41)]
    written: list[int] = []

    class File:
        def write(self, group: list[Any]) -> None:
            written.append(len(group))

        def close(self) -> None: ...

    of: Any = object.__new__(precompute._Precomputing)
    of.job = SimpleNamespace(verify_bytes=None)
    of.world = SimpleNamespace(leads=True, barrier=lambda: None)
    of.tokenizer, of.compute = None, lambda rows: rows
    monkeypatch.setattr(precompute, "GROUP_BYTES", 500)
    monkeypatch.setattr(precompute, "RowFile", lambda _: File())
    monkeypatch.setattr(precompute.tokenized, "reader", lambda *_: SimpleNamespace(share=1.0))
    monkeypatch.setattr(precompute.tokenized, "made_by", lambda _: {})
    found = []
    for workers in (2, 7):
        rounds = [(block[i : i + workers], i + workers >= len(block)) for i in range(0, len(block), workers)]
        of._rounds = lambda *_, rounds=rounds: rounds
        of.write("a", SimpleNamespace(path="x", limit=None), str(tmp_path / f"out-{workers}"))
        found.append(written.copy())
        written.clear()
    assert found[0] == found[1]
    assert sum(found[0]) == len(block)
    assert len(found[0]) > 5


@pytest.mark.parametrize(
    ("limit", "rounds"),
    [
        (None, [([0, 1, 2], False), ([3], True), ([4, 5, 6], False), ([7], True)]),
        (0, []),
        (2, [([0, 1], True)]),
        (4, [([0, 1, 2], False), ([3], True)]),
        (5, [([0, 1, 2], False), ([3], True), ([4], True)]),
    ],
)
def test_rounds_have_every_row_up_to_the_limit(monkeypatch, limit, rounds):
    """Two blocks of four rows with 10 tokens each; a round has at least 24 tokens, or ends with its block."""

    class Block:
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 4

        def row(self, i: int) -> dict[str, Any]:
            return {"units": [(Document(np.full(10, self.first + i, np.int32), np.ones(10, np.float32)),)]}

    read = list[int]()

    def once(_: Any) -> Any:
        for first in (0, 4):
            read.append(first)
            yield Block(first), None

    monkeypatch.setattr(precompute, "ROUND", 3)
    monkeypatch.setattr(precompute, "blocks_once", once)
    of: Any = object.__new__(precompute._Precomputing)
    of.job = SimpleNamespace(train=SimpleNamespace(micro_batch_sequences=2), data=SimpleNamespace(seq_len=2))
    of.world = World(meshes=Meshes(MeshSizes(shard=2)))
    found = [([int(row[0][0].tokens[0]) for row in rows], ends) for rows, ends in of._rounds(None, limit)]
    assert found == rounds
    assert read == ([0, 4] if limit in (None, 5) else [0]), "no block is read beyond the limit"
