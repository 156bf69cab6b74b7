"""Encoded rows as parquet: tokenize once, then train as if on the fly.

The one idea: one row of parquet is one row of the source with its atoms (none, where it was dropped or bad), so an epoch has the same samples (in the
order of its own blocks), and whatever reads parquet reads it.
"""

import contextlib
import multiprocessing
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ptf import scratch, storage, verified
from ptf.data.blocks import Block, Location, Reader, Row
from ptf.data.encode import COUNTS, Encode, Encoder, TooLong
from ptf.data.kinds import found_out
from ptf.data.quarantine import BadRow, Quarantine
from ptf.data.sample import Atom, Sample, dump_atoms
from ptf.data.sources import Place, SourceSpec, blocks_once, place
from ptf.data.tokenizer import Tokenizer
from ptf.entry import end_with_parent
from ptf.errors import UserError

COLUMNS = {"atoms": pa.int32(), "lengths": pa.int32(), "tokens": pa.int32(), "weights": pa.float32(), "sources": pa.string()}  # lists, of each row
STREAM = "stream/"  # before a stream's name: a column of [tokens of the row] or [tokens of the row, k]
ROWS_IN_GROUP = 1024
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
    made_with = {"tokenizer": tokenizer.identity, "config": config_fingerprint}
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


def columns_of(atoms: Sequence[Atom]) -> dict[str, Any]:
    """Of one row. `streams`: name → the values of all its samples, one after the other."""
    assert not any(sample.begins for atom in atoms for sample in atom), "beginnings are shared where rows are read; what is written down is whole"
    columns = dump_atoms(atoms)
    for name, stream in columns["streams"].items():
        if len(stream["samples"]) != len(columns["lengths"]):
            raise UserError(f"the stream {name} is carried by some of the row's samples; it must be by all, or by none")
    return {**columns, "streams": {name: stream["values"] for name, stream in columns["streams"].items()}}


def side_by_side(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What `columns_of` made of rows, as columns."""
    rows = list(rows)
    return {column: [row[column] for row in rows] for column in (*COLUMNS, "streams")}


class RowFile:
    """A parquet file whose columns are known when there is a sample: then it is known which streams samples carry."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._held = path, None, []
        self._streams: dict[str, tuple[pa.DataType, int]] = {}

    def write(self, columns: Mapping[str, list[Any]]) -> None:
        self._held.append(columns)
        if self._file is None and any(map(len, columns["lengths"])):
            first = next(streams for streams, lengths in zip(columns["streams"], columns["lengths"], strict=True) if len(lengths))
            self._open({name: _kind(values) for name, values in first.items()})
        if self._file is not None:
            self._flush()

    def _open(self, streams: dict[str, tuple[pa.DataType, int]]) -> None:
        self._streams = streams
        fields = COLUMNS | {f"{STREAM}{name}": pa.list_(kind, k) if k else kind for name, (kind, k) in streams.items()}
        self._file = pq.ParquetWriter(self._path, pa.schema([(name, pa.list_(kind)) for name, kind in fields.items()]), compression="zstd")

    def _flush(self) -> None:
        assert self._file is not None
        for columns in self._held:
            found = (streams for streams, lengths in zip(columns["streams"], columns["lengths"], strict=True) if len(lengths))
            if (other := next((streams for streams in found if streams.keys() != self._streams.keys()), None)) is not None:
                raise UserError(f"samples carry other streams than the first one: {sorted(other)} and {sorted(self._streams)}")
            arrays = [_lists(columns[name], kind) for name, kind in COLUMNS.items()]
            for name, (kind, k) in self._streams.items():
                empty = np.zeros((0, k) if k else 0)
                arrays.append(_lists([streams.get(name, empty) for streams in columns["streams"]], kind, k))
            self._file.write_table(pa.Table.from_arrays(arrays, schema=self._file.schema), ROWS_IN_GROUP)
        self._held.clear()

    def close(self) -> None:
        if self._file is None:
            self._open({})
        self._flush()
        self._file.close()  # type: ignore[union-attr]


def _kind(values: np.ndarray) -> tuple[pa.DataType, int]:
    """Of a stream: what it holds, and k; 0 where it is one value a token."""
    return pa.int32() if values.dtype.kind in "iu" else pa.float32(), values.shape[1] if values.ndim == 2 else 0


def _lists(rows: Sequence[Any], kind: pa.DataType, k: int = 0) -> pa.ListArray:
    """One list a row."""
    offsets = pa.array(np.cumsum([0, *map(len, rows)], dtype=np.int32))
    if isinstance(rows[0], list):
        return pa.ListArray.from_arrays(offsets, pa.array([text for row in rows for text in row], kind))
    values = pa.array(np.concatenate(rows).reshape(-1), kind)
    return pa.ListArray.from_arrays(offsets, pa.FixedSizeListArray.from_arrays(values, k) if k else values)


NO_STREAMS: dict[str, np.ndarray] = {}


class TokenRows:
    """Rows of a group of such a file: its columns as long arrays, of which a row's samples are slices."""

    def __init__(self, table: pa.Table):
        self.lines, self.nbytes = table.num_rows, table.nbytes
        columns = {name: _column(table.column(name)) for name in table.column_names}
        self._first_atom, atoms = columns["atoms"]  # of each row; and how many samples each atom has
        self._first_sample, lengths = columns["lengths"]  # of each row; and how many tokens each sample has
        self._atoms = atoms.tolist()
        self._ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]  # tokens before each sample
        self._tokens, self._weights, self._sources = columns["tokens"][1], columns["weights"][1], columns["sources"][1]
        self._streams = {name.removeprefix(STREAM): values for name, (_, values) in columns.items() if name.startswith(STREAM)}
        self.told = self._told()

    def _told(self) -> list[tuple[int, int, int, int]]:
        """Of every row: atoms, tokens, those that are trained, tokens of the longest atom."""
        ends = np.array(self._ends)
        samples = np.concatenate([[0], np.cumsum(self._atoms, dtype=np.int64)])
        of_rows, of_atoms = ends[self._first_sample], np.diff(ends[samples])
        trained = np.concatenate([[0], np.cumsum(self._weights != 0, dtype=np.int32)])[of_rows]
        first = np.array(self._first_atom)
        longest = np.zeros(self.lines, np.int64)
        some = np.flatnonzero(np.diff(first))
        if len(some):
            longest[some] = np.maximum.reduceat(of_atoms, first[some])
        columns = np.diff(first), np.diff(of_rows), np.diff(trained), longest
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def columnar(self) -> bool:
        """Of no meaning here: a row is its samples."""
        return False

    def __len__(self) -> int:
        return self.lines

    def line(self, i: int) -> int:
        return i

    def row(self, i: int) -> Row:
        return {"atoms": self.atoms(i)}

    def atoms(self, i: int) -> list[Atom]:
        """Row i's."""
        at, made = self._first_sample[i], []
        first, end = self._first_atom[i], self._first_atom[i + 1]
        if end - first == 1 and self._atoms[first] == 1:
            return [(self._sample(at),)]
        for n in self._atoms[first:end]:
            made.append(tuple([self._sample(k) for k in range(at, at + n)]))
            at += n
        return made

    def _sample(self, k: int) -> Sample:
        start, end = self._ends[k], self._ends[k + 1]
        streams = {name: values[start:end] for name, values in self._streams.items()} if self._streams else NO_STREAMS
        return Sample(self._tokens[start:end], self._weights[start:end], self._sources[k], streams)

    def part(self, start: int, end: int) -> Block:
        raise NotImplementedError("what is tokenized is not tokenized again")


ONES = np.ones(1 << 16, np.float32)


def hollow(n: int) -> Atom:
    """As long as an atom of n tokens, and empty."""
    return (Sample(range(n), ONES[:n] if n <= len(ONES) else np.ones(n, np.float32)),)  # type: ignore[arg-type]


class LengthRows(TokenRows):
    """The same rows, of which only the lengths of the atoms are read."""

    def __init__(self, table: pa.Table):
        self.lines, self.nbytes = table.num_rows, table.nbytes
        self._first_atom, atoms = _column(table.column("atoms"))
        ends = np.concatenate([[0], np.cumsum(_column(table.column("lengths"))[1], dtype=np.int64)])
        at = np.concatenate([[0], np.cumsum(atoms, dtype=np.int64)])
        self._of_atoms = np.diff(ends[at]).tolist()  # tokens of each atom
        self.told = None

    def atoms(self, i: int) -> list[Atom]:
        return [hollow(n) for n in self._of_atoms[self._first_atom[i] : self._first_atom[i + 1]]]


def lengths_reader(reader: Reader) -> Reader:
    """The same files, for their lengths."""
    return Reader(reader.path, LengthRows, ["atoms", "lengths"])


def _column(column: pa.ChunkedArray) -> tuple[list[int], Any]:
    """Where each row's values begin, and the end of the last one's; and all values."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    offsets = np.asarray(lists.offsets)
    values = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    return (offsets - offsets[0]).tolist(), values.to_pylist() if pa.types.is_string(values.type) else _values(values)


def _values(found: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(found.type):
        return found.flatten().to_numpy(zero_copy_only=False).reshape(-1, found.type.list_size)
    return found.to_numpy(zero_copy_only=False)


def decode(row: Row, name: str) -> list[Atom]:
    """The atoms of a row read here; takes the encoder's place."""
    return row["atoms"]


class Decoder(Encoder):
    """The encoder of rows read here. What a row counts is known of its whole block, so a row whose atoms fit costs little more than their slices."""

    def __init__(self, name: str, seq_len: int, too_long: TooLong, share: bool = False) -> None:
        super().__init__(decode, name, seq_len, too_long, kind="tokenized", share=share)
        self._longest = -1 if share else seq_len  # what is shared follows from the tokens

    def __call__(self, place: Place) -> list[Atom]:
        block = place.block
        if not isinstance(block, TokenRows) or block.told is None:
            return super().__call__(place)
        atoms, tokens, trained, longest = block.told[place.row]
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
    return manifest
