"""The file of tokenized data: parquet in which a row of the source is one row, and its tokens are one cell of bytes.

The one idea: a column of cells decodes to one buffer, and lists of numbers to a number at a time. So what grows with a row's tokens is stored as cells
of little-endian bytes, a row group is read as a few long arrays, and every sample is a slice of them. Loss weights are stored as runs of equal ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ptf.data.blocks import Block, Row
from ptf.data.sample import Atom, Sample, dump_atoms
from ptf.errors import UserError

FORM = 2  # of the file: data of another one are tokenized again
ROWS_IN_GROUP = 1024
CELL = pa.large_binary()
COMPRESSION = "lz4"  # a document of 300 tokens: 0.5 to 0.8 us to decode and 0.6 to 1.2 KB, where zstd takes 1.3 to 1.8 us and 0.4 to 0.8 KB
COLUMNS = {
    "atoms": pa.list_(pa.int32()),  # how many samples each atom of the row has
    "lengths": pa.list_(pa.int32()),  # how many tokens each sample has
    "tokens": CELL,  # int32, of all samples, one after the other
    "weights": CELL,  # runs of equal weights: pairs of a number of tokens (int32) and their weight (float32)
    "sources": pa.list_(pa.string()),  # of each sample
}
STREAM = "stream/"  # before a stream's name: a column of cells, whose field says `kind` (int32 or float32) and `k` (values a token; 0: one, without an axis)


def columns_of(atoms: Sequence[Atom]) -> dict[str, Any]:
    """Of one row. `streams`: name → the values of all its samples, one after the other."""
    assert not any(sample.begins for atom in atoms for sample in atom), "beginnings are shared where rows are read; what is written down is whole"
    columns = dump_atoms(atoms)
    for name, stream in columns["streams"].items():
        if len(stream["samples"]) != len(columns["lengths"]):
            raise UserError(f"the stream {name} is carried by some of the row's samples; it must be by all, or by none")
    return {**columns, "weights": runs(columns["weights"]), "streams": {name: stream["values"] for name, stream in columns["streams"].items()}}


def runs(weights: np.ndarray) -> np.ndarray:
    """How many equal weights follow each other, and the bits of each. [n] float32 → [runs, 2] int32"""
    bits = np.ascontiguousarray(weights, np.float32).view(np.int32)
    starts = np.flatnonzero(np.concatenate([[True], bits[1:] != bits[:-1]])) if len(bits) else np.zeros(0, np.int64)
    return np.stack([np.diff(starts, append=len(bits)), bits[starts]], 1).astype(np.int32)


def weights_of(runs: np.ndarray) -> np.ndarray:
    """The inverse of `runs`: [runs, 2] int32 → [n] float32"""
    return np.repeat(runs[:, 1].view(np.float32), runs[:, 0])


def side_by_side(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What `columns_of` made of rows, as columns."""
    rows = list(rows)
    return {column: [row[column] for row in rows] for column in (*COLUMNS, "streams")}


class RowFile:
    """A file that is written. Its columns are known when there is a sample: then it is known which streams samples carry."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._held = path, None, []
        self._streams: dict[str, tuple[np.dtype, int]] = {}

    def write(self, columns: Mapping[str, list[Any]]) -> None:
        self._held.append(columns)
        if self._file is None and any(map(len, columns["lengths"])):
            first = next(streams for streams, lengths in zip(columns["streams"], columns["lengths"], strict=True) if len(lengths))
            self._open({name: _kind(values) for name, values in first.items()})
        if self._file is not None:
            self._flush()

    def _open(self, streams: dict[str, tuple[np.dtype, int]]) -> None:
        self._streams = streams
        said = {name: {"kind": kind.name, "k": str(k)} for name, (kind, k) in streams.items()}
        fields = [pa.field(name, kind) for name, kind in COLUMNS.items()] + [pa.field(f"{STREAM}{name}", CELL, metadata=each) for name, each in said.items()]
        small = [f"{name}.list.element" for name in ("atoms", "lengths", "sources")]  # of cells, a dictionary would only cost time
        self._file = pq.ParquetWriter(
            self._path, pa.schema(fields), compression=COMPRESSION, use_dictionary=small, write_statistics=False,  # type: ignore[arg-type]  # names, too
        )  # fmt: skip

    def _flush(self) -> None:
        assert self._file is not None
        for columns in self._held:
            found = (streams for streams, lengths in zip(columns["streams"], columns["lengths"], strict=True) if len(lengths))
            if (other := next((streams for streams in found if streams.keys() != self._streams.keys()), None)) is not None:
                raise UserError(f"samples carry other streams than the first one: {sorted(other)} and {sorted(self._streams)}")
            arrays = [_cells(columns[name], np.dtype(np.int32)) if kind == CELL else _lists(columns[name], kind) for name, kind in COLUMNS.items()]
            for name, (kind, _) in self._streams.items():
                arrays.append(_cells([streams.get(name, np.zeros(0, kind)) for streams in columns["streams"]], kind))
            self._file.write_table(pa.Table.from_arrays(arrays, schema=self._file.schema), ROWS_IN_GROUP)
        self._held.clear()

    def close(self) -> None:
        if self._file is None:
            self._open({})
        self._flush()
        self._file.close()  # type: ignore[union-attr]


def _kind(values: np.ndarray) -> tuple[np.dtype, int]:
    """Of a stream: what it holds, and k; 0 where it is one value a token."""
    return np.dtype(np.int32 if values.dtype.kind in "iu" else np.float32), values.shape[1] if values.ndim == 2 else 0


def _cells(rows: Sequence[np.ndarray], kind: np.dtype) -> pa.Array:
    """Each row's values as bytes."""
    flat = [np.ascontiguousarray(row, kind).reshape(-1) for row in rows]
    ends = np.cumsum([0, *(row.nbytes for row in flat)], dtype=np.int64)
    return pa.Array.from_buffers(CELL, len(flat), [None, pa.py_buffer(ends), pa.py_buffer(np.concatenate(flat))])


def _lists(rows: Sequence[Any], kind: pa.ListType) -> pa.ListArray:
    """One list a row."""
    values = [text for row in rows for text in row] if isinstance(rows[0], list) else np.concatenate(rows)
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, rows)], dtype=np.int32)), pa.array(values, kind.value_type))


NO_STREAMS: dict[str, np.ndarray] = {}


class TokenRows:
    """Rows of a group of such a file: its columns as long arrays, of which a row's samples are slices."""

    def __init__(self, table: pa.Table):
        self.lines = table.num_rows
        self._first_atom, self._atoms = _list(table, "atoms")  # of each row, and the end of the last one's; how many samples each atom has
        self._first_sample, lengths = _list(table, "lengths")
        self._ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # tokens before each sample
        self.tokens, self.runs = _values(table, "tokens", np.int32), _values(table, "weights", np.int32).reshape(-1, 2)
        ends = np.concatenate([[0], np.cumsum(self.runs[:, 0], dtype=np.int64)])  # tokens before each run
        assert len(self.tokens) == self._ends[-1] == ends[-1], "a row group whose columns are not of the same tokens"
        self._first_run = np.searchsorted(ends, self._ends[self._first_sample])  # of each row, and the end of the last one's
        self._sources = _list(table, "sources")[1]
        self._streams = {name.removeprefix(STREAM): _stream(table, name) for name in table.column_names if name.startswith(STREAM)}
        self.nbytes = table.nbytes
        self.told = self._told()
        self.longest = int(self.told[:, 3].max(initial=0))  # tokens of an atom
        one = np.diff(self._first_sample) == 1 if not self._streams else np.zeros(self.lines, bool)
        self._several = np.concatenate([[0], np.cumsum(~one)])  # rows before each that are not one sample without streams

    def _told(self) -> np.ndarray:
        """Of every row: atoms, tokens, those that are trained, tokens of the longest atom. [rows, 4] int64"""
        samples = np.concatenate([[0], np.cumsum(self._atoms, dtype=np.int64)])
        of_rows, of_atoms = self._ends[self._first_sample], np.diff(self._ends[samples])
        trained = np.concatenate([[0], np.cumsum(self.runs[:, 0] * (self.runs[:, 1].view(np.float32) != 0), dtype=np.int64)])[self._first_run]
        longest = np.zeros(self.lines, np.int64)
        some = np.flatnonzero(np.diff(self._first_atom))
        if len(some):
            longest[some] = np.maximum.reduceat(of_atoms, self._first_atom[some])
        return np.stack([np.diff(self._first_atom), np.diff(of_rows), np.diff(trained), longest], 1)

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
        at, made, weights = int(self._first_sample[i]), [], weights_of(self.runs[self._first_run[i] : self._first_run[i + 1]])
        before = self._ends[at]
        for n in self._atoms[self._first_atom[i] : self._first_atom[i + 1]].tolist():
            made.append(tuple([self._sample(k, weights, before) for k in range(at, at + n)]))
            at += n
        return made

    def _sample(self, k: int, weights: np.ndarray, before: int) -> Sample:
        """`weights` are the row's, before which come so many tokens."""
        start, end = self._ends[k], self._ends[k + 1]
        streams = {name: values[start:end] for name, values in self._streams.items()} if self._streams else NO_STREAMS
        return Sample(self.tokens[start:end], weights[start - before : end - before], self._sources[k], streams)

    def simple(self, first: int, end: int) -> bool:
        """Whether each of these rows is one sample, without streams."""
        return bool(self._several[first] == self._several[end])

    def spans(self, first: int, end: int) -> tuple[list[int], list[int], list[str]]:
        """Of such rows, where the tokens of each begin, and those of the last one end; the same of their runs; and the sources of their samples."""
        at = self._first_sample[first : end + 1]
        return self._ends[at].tolist(), self._first_run[first : end + 1].tolist(), self._sources[at[0] : at[-1]]

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
        self._first_atom, atoms = _list(table, "atoms")
        ends = np.concatenate([[0], np.cumsum(_list(table, "lengths")[1], dtype=np.int64)])
        at = np.concatenate([[0], np.cumsum(atoms, dtype=np.int64)])
        self._of_atoms = np.diff(ends[at]).tolist()  # tokens of each atom
        self.told = None

    def atoms(self, i: int) -> list[Atom]:
        return [hollow(n) for n in self._of_atoms[self._first_atom[i] : self._first_atom[i + 1]]]


def _list(table: pa.Table, name: str) -> tuple[np.ndarray, Any]:
    """Where each row's values begin, and the end of the last one's; and all values, a list where they are strings."""
    lists = _one(table, name)
    offsets = np.asarray(lists.offsets)
    values = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    if pa.types.is_string(values.type):
        few = values.dictionary_encode()
        names = few.dictionary.to_pylist()
        return offsets - offsets[0], names * len(values) if len(names) == 1 else [names[i] for i in few.indices.to_pylist()]
    return offsets - offsets[0], values.to_numpy(zero_copy_only=False)


def _values(table: pa.Table, name: str, kind: Any) -> np.ndarray:
    """What all cells of a column hold, one after the other."""
    cells = _one(table, name)
    _, ends, data = cells.buffers()
    if data is None:
        return np.zeros(0, kind)
    offsets = np.frombuffer(ends, np.int64, len(cells) + 1, cells.offset * 8)
    return np.frombuffer(data, kind, (offsets[-1] - offsets[0]) // np.dtype(kind).itemsize, offsets[0])


def _stream(table: pa.Table, name: str) -> np.ndarray:
    said = table.schema.field(name).metadata
    k = int(said[b"k"])
    return _values(table, name, said[b"kind"].decode()).reshape(-1, *([k] if k else []))


def _one(table: pa.Table, name: str) -> Any:
    """A column in one piece."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
