"""Encoded rows as parquet: tokenize once, then train as if on the fly.

The one idea: one row of parquet is one row of the source with its atoms (none, where it was dropped or bad), so an epoch has the same samples (in the
order of its own blocks). How a row is stored is said in ptf/data/token_file.py.
"""

import contextlib
import multiprocessing
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptf import scratch, storage, verified
from ptf.data.blocks import Block, Location, Reader, Row
from ptf.data.encode import COUNTS, Encode, Encoder, TooLong
from ptf.data.kinds import found_out
from ptf.data.quarantine import BadRow, Quarantine
from ptf.data.sample import Atom
from ptf.data.sources import Place, SourceSpec, blocks_once, place
from ptf.data.token_file import FORM, ROWS_IN_GROUP, LengthRows, RowFile, TokenRows, columns_of, side_by_side
from ptf.data.tokenizer import Tokenizer
from ptf.entry import end_with_parent
from ptf.errors import UserError

ROWS_AT_ONCE = 256  # that one process is given
FEW_BYTES = 8 << 20  # of source that are not worth further processes
TOLD_S = 10.0  # between lines of progress
BAD_ROWS = "bad_rows.jsonl"

Encoded = tuple[dict[str, list[Any]], dict[str, int], list[BadRow]]  # columns by row, counts, what was set aside


@dataclass
class _Work:
    """Encodes some rows of a block, here or in another process."""

    encode: Encode
    name: str
    seq_len: int
    too_long: TooLong
    spec: SourceSpec
    skip_bad: bool

    def __call__(self, block: Block, uri: str, before: int) -> Encoded:
        aside: list[BadRow] = []
        keep = (lambda bad, counts: aside.append(bad)) if self.skip_bad else None
        encoder = Encoder(self.encode, self.name, self.seq_len, self.too_long, columns=self.spec.columns, kind=self.spec.kind, set_aside=keep)
        rows = [columns_of(encoder(place(block, i, uri, before))) for i in range(len(block))]
        return side_by_side(rows), encoder.counts, aside


_work: _Work | None = None  # in a process of the pool: what it was started with, which need not be picklable


def _start(work: _Work, parent: int) -> None:
    global _work
    end_with_parent(parent)
    _work = work


def _run(block: Block, uri: str, before: int) -> Encoded:
    assert _work is not None
    return _work(block, uri, before)


def write(
    directory: str, spec: SourceSpec, name: str, *, encode: Encode, seq_len: int, too_long: TooLong, tokenizer: Tokenizer, config_fingerprint: str,
    max_bad: float | None = None, processes: int = 1,
) -> Mapping[str, Any]:  # fmt: skip
    """Encode every row of a source into a local directory, in `processes` where it is large, with a line of progress now and then. With `max_bad`,
    that share of the rows may be bad; they are listed in `bad_rows.jsonl`. Returns the manifest, which is written last; where one is there already,
    from the same tokenizer and config, nothing is done."""
    made_with = {**made_by(tokenizer), "config": config_fingerprint}
    root = Path(directory)
    if (root / storage.MANIFEST).exists():
        manifest = verified.verify(directory, spec.verify_up_to, f"remove {directory}: it is made again")
        if manifest.items() >= made_with.items():
            return manifest
    with scratch.directory(root) as part:  # others may be reading what is there
        (part / "new").mkdir()
        counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        aside = Quarantine(part / "new" / BAD_ROWS, max_bad or 0.0)
        reader = Reader(Location.of(spec))
        work = _Work(encode, name, seq_len, too_long, found_out(spec, reader), max_bad is not None)
        with contextlib.closing(RowFile(part / "new" / "rows.parquet")) as file:
            for columns, counted, bad in _encoded(work, reader, spec.limit, processes):
                counts.update(counted)
                for row in bad:
                    aside.add(row, counts)
                file.write(columns)
        made_with |= {"commit": reader.commit} if reader.commit else {}  # of a dataset of the Hub
        manifest = storage.commit(part / "new", {**made_with, "source": name, **counts, "expansion": counts["tokens"] / max(1, counts["whole"])})
        if root.exists():
            os.replace(root, part / "old")  # from another tokenizer or config, under the same name
        os.replace(part / "new", root)
        return manifest


def _encoded(work: _Work, reader: Reader, limit: int | None, processes: int) -> Iterator[Encoded]:
    """What `work` makes of every row, in groups of the parquet file, in order."""
    tell = Progress("tokenize", work.name, reader)
    if processes == 1 or sum(reader.sizes) < FEW_BYTES:
        found: Iterable[Encoded] = (work(*piece) for piece in _pieces(reader, limit))
    else:
        found = _in_processes(work, _pieces(reader, limit), processes)
    for group in _grouped(found):
        tell(group[1])
        yield group


def _pieces(reader: Reader, limit: int | None) -> Iterator[tuple[Block, str, int]]:
    left = limit
    for block, uri, before in blocks_once(reader):
        end = len(block) if left is None else min(len(block), left)
        for at in range(0, end, ROWS_AT_ONCE):
            yield block.part(at, min(at + ROWS_AT_ONCE, end)), uri, before
        if left is not None:
            left -= end
            if not left:
                return


def _in_processes(work: _Work, pieces: Iterator[tuple[Block, str, int]], processes: int) -> Iterator[Encoded]:
    """In order, and never more than a few pieces ahead. Processes are forked, for encoders are often closures."""
    with (
        _quiet_forks(),
        ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start, (work, os.getpid())) as pool,
    ):
        waiting: deque[Future[Encoded]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_run, *piece))
                if len(waiting) > 3 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError(f"a process that tokenized {work.name} died (out of memory?)") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _quiet_forks() -> Iterator[None]:
    """A process that is forked after its parent has used threads of the tokenizers' warns, unless told not to use any."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _grouped(found: Iterable[Encoded]) -> Iterator[Encoded]:
    """The same rows, at least `ROWS_IN_GROUP` at a time."""
    columns: dict[str, list[Any]] = {}
    counts: Counter[str] = Counter()
    bad: list[BadRow] = []
    for more, counted, aside in found:
        for column, rows in more.items():
            columns.setdefault(column, []).extend(rows)
        counts.update(counted)
        bad += aside
        if len(columns["atoms"]) >= ROWS_IN_GROUP:
            yield columns, counts, bad
            columns, counts, bad = {}, Counter(), []
    if columns:
        yield columns, counts, bad


class Progress:
    """Prints a line now and then."""

    def __init__(self, stage: str, name: str, reader: Reader) -> None:
        self._name, self._reader = f"{stage}: {name}", reader
        self._began = self._told = time.monotonic()
        self._rows = self._tokens = 0

    def __call__(self, counts: Mapping[str, int]) -> None:
        self._rows, self._tokens, now = self._rows + counts["rows"], self._tokens + counts["tokens"], time.monotonic()
        if now - self._told < TOLD_S:
            return
        self._told, spent, share = now, now - self._began, self._reader.share
        print(
            f"{self._name}: {self._rows:,} rows, {share:.0%}, {self._rows / spent:,.0f} rows/s, {self._tokens / spent:,.0f} tokens/s, "
            f"{spent * (1 - share) / max(share, 1e-9):,.0f} s to go", flush=True,
        )  # fmt: skip


def made_by(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the manifest of tokenized data says of how it was made, at least."""
    return {"tokenizer": tokenizer.identity, "storage": FORM}


def lengths_reader(reader: Reader) -> Reader:
    """The same files, for their lengths."""
    return Reader(reader.path, LengthRows, ["atoms", "lengths"])


def decode(row: Row, name: str) -> list[Atom]:
    """The atoms of a row read here; takes the encoder's place."""
    return row["atoms"]


class Decoder(Encoder):
    """The encoder of rows read here. What a row counts is known of its whole block, so a row whose atoms fit costs little more than their slices."""

    def __init__(self, name: str, seq_len: int, too_long: TooLong, share: bool = False) -> None:
        super().__init__(decode, name, seq_len, too_long, kind="tokenized", share=share)
        self._longest = -1 if share else seq_len  # what is shared follows from the tokens

    def fits(self, block: Block) -> bool:
        """Whether every atom of a block is kept as it is."""
        return isinstance(block, TokenRows) and block.told is not None and block.longest <= self._longest

    def counted(self, told: np.ndarray) -> np.ndarray:
        """The counts before rows of such blocks, of which `told` says what each counts, and behind each of them. [rows + 1, len(COUNTS)] int64"""
        steps = np.zeros((len(told) + 1, len(COUNTS)), np.int64)
        steps[0] = [self.counts[key] for key in COUNTS]
        steps[1:, :5] = 1
        steps[1:, 1:5] = told
        steps[1:, COUNTS.index("left_out")] = told[:, 0] == 0
        return np.cumsum(steps, 0)

    def __call__(self, place: Place) -> list[Atom]:
        block = place.block
        if not isinstance(block, TokenRows) or block.told is None:
            return super().__call__(place)
        atoms, tokens, trained, longest = block.told[place.row].tolist()
        if longest > self._longest:
            return super().__call__(place)
        counts = self.counts
        counts["rows"] += 1
        counts["samples"] += atoms
        counts["left_out"] += not atoms
        counts["tokens"] += tokens
        counts["trained"] += trained
        counts["whole"] += longest
        return block.atoms(place.row)


def reader(path: str, tokenizer: Tokenizer, verify_up_to: float = float("inf")) -> Reader:
    """Its rows, for `decode`. Raises UserError where another tokenizer wrote them, or they are not what was written."""
    tokenizer.refuse_other(whole(path, verify_up_to)["tokenizer"], path)
    return Reader(path, TokenRows)


def whole(path: str, verify_up_to: float) -> dict[str, Any]:
    """The manifest of tokenized data that is what was written (ptf.verified). Raises UserError naming what is not."""
    if not storage.exists(f"{path.rstrip('/')}/{storage.MANIFEST}"):
        raise UserError(f"{path} is not tokenized data, or its writing never finished: it has no {storage.MANIFEST}")
    mend = f"remove {path}: it is made again"
    manifest = verified.verify(path, verify_up_to, mend)
    made_as, key = manifest.get("config", ""), path.rstrip("/").rpartition("-")[2]
    if "tokenizer" not in manifest or (re.fullmatch("[0-9a-f]{16}", key) and made_as and made_as != key):
        raise storage.Corrupt(f"{path} holds what was made of other data ({made_as or 'no tokenized data'}); {mend}")
    if manifest.get("storage") != FORM:
        raise UserError(f"{path} was written by a version of ptf that stored tokenized data in another form: tokenize it again")
    return manifest
