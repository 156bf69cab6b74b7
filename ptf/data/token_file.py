"""The file of tokenized data: parquet in which a row of the source is one row, and its tokens are one cell of bytes.

A column of cells decodes to one buffer, a column of lists one number at a time. So data that grows with a
row's tokens is stored as cells of little-endian bytes, a row group is read as a few long arrays, and every sample is a
slice of them. Loss weights are stored as runs of equal weights.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ptf.data.document import Document, PackUnit
from ptf.data.sources.blocks import Row, RowBlock
from ptf.errors import UserError

FORM = 3  # version of the file; data of another version are tokenized again
ROWS_IN_GROUP = 1024
CELL = pa.large_binary()
# For a document of 300 tokens: 0.5 to 0.8 us to decode and 0.6 to 1.2 KB, where zstd takes 1.3 to 1.8 us and 0.4
# to 0.8 KB.
COMPRESSION = "lz4"
COLUMNS = {
    "units": pa.list_(pa.int32()),  # number of samples in each pack unit of the row
    "lengths": pa.list_(pa.int32()),  # number of tokens in each sample
    "tokens": CELL,  # int32, of all samples, one after the other
    "weights": CELL,  # runs of equal weights: pairs of a number of tokens (int32) and their weight (float32)
    "sources": pa.list_(pa.string()),  # of each sample
}
# Beginning of the name of a column of per-token values. Its cells hold what the field's metadata say: `kind` (int32 or
# float32) and `k` (values per token; 0: one value, without an axis).
COLUMN_PREFIX = "stream/"


def unit_columns(units: Sequence[PackUnit]) -> dict[str, Any]:
    """Return one row as columns; `token_columns` maps the name of per-token values to those of all samples, one after
    the other.

    Raises UserError where only some of the row's samples have the values of a name.
    """
    samples = [sample for unit in units for sample in unit]
    assert not any(sample.prefix_length for sample in samples), (
        "samples share beginnings only after they are read; stored samples are complete"
    )
    names = sorted({name for sample in samples for name in sample.token_columns})
    for name in names:
        if not all(name in sample.token_columns for sample in samples):
            raise UserError(
                f"only some of the row's samples have the per-token values {name}; all of them must, or none"
            )
    return {
        "units": np.array([len(unit) for unit in units], np.int32),
        "lengths": np.array([len(sample) for sample in samples], np.int32),
        "tokens": np.concatenate([sample.tokens for sample in samples] or [np.zeros(0, np.int32)]),
        "weights": runs(np.concatenate([sample.loss_weights for sample in samples] or [np.zeros(0, np.float32)])),
        "sources": [sample.source for sample in samples],
        "token_columns": {name: np.concatenate([sample.token_columns[name] for sample in samples]) for name in names},
    }


def runs(weights: np.ndarray) -> np.ndarray:
    """Return the lengths of runs of equal weights and the bits of each weight, [n] float32 → [runs, 2] int32."""
    bits = np.ascontiguousarray(weights, np.float32).view(np.int32)
    ends = np.append((bits[1:] != bits[:-1]).nonzero()[0] + 1, len(bits)) if len(bits) else np.zeros(0, np.int64)
    return np.stack([np.diff(ends, prepend=0), bits[ends - 1]], 1).astype(np.int32)


class RowFile:
    """A file that is being written.

    It is opened at the first row with a sample, because its columns depend on which per-token values samples have.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._pending = path, None, []
        self._token_columns: dict[str, tuple[np.dtype, int]] = {}

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows that `unit_columns` made, as row groups of their own.

        Raises UserError where samples have other per-token values than the first one.
        """
        for row in rows:
            token_columns = row["token_columns"]
            if not len(row["lengths"]):
                continue
            if self._file is None:
                self._open({name: _kind(values) for name, values in token_columns.items()})
            if token_columns.keys() != self._token_columns.keys():
                raise UserError(
                    f"samples have other per-token values than the first: {sorted(token_columns)}, "
                    f"not {sorted(self._token_columns)}"
                )
        self._pending.append(rows)
        if self._file is not None:
            self._flush()

    def _open(self, token_columns: dict[str, tuple[np.dtype, int]]) -> None:
        self._token_columns = token_columns
        fields = [pa.field(name, kind) for name, kind in COLUMNS.items()] + [
            pa.field(f"{COLUMN_PREFIX}{name}", CELL, metadata={"kind": kind.name, "k": str(k)})
            for name, (kind, k) in token_columns.items()
        ]
        # A dictionary of cells would only cost time.
        small = [f"{name}.list.element" for name in ("units", "lengths", "sources")]
        self._file = pq.ParquetWriter(
            self._path,
            pa.schema(fields),
            compression=COMPRESSION,
            use_dictionary=small,  # type: ignore[arg-type]
            write_statistics=False,
        )

    def _flush(self) -> None:
        assert self._file is not None
        for rows in self._pending:
            arrays = []
            for name, kind in COLUMNS.items():
                values = [row[name] for row in rows]
                arrays.append(_cells(values, np.dtype(np.int32)) if kind == CELL else pa.array(values, kind))
            for name, (kind, _) in self._token_columns.items():
                arrays.append(_cells([row["token_columns"].get(name, np.zeros(0, kind)) for row in rows], kind))
            self._file.write_table(pa.Table.from_arrays(arrays, schema=self._file.schema), ROWS_IN_GROUP)
        self._pending.clear()

    def close(self) -> None:
        """Write the remaining rows and close the file."""
        if self._file is None:
            self._open({})
        self._flush()
        cast("pq.ParquetWriter", self._file).close()


def _kind(values: np.ndarray) -> tuple[np.dtype, int]:
    """Return the type of per-token values, and k: the values per token, 0 for one value without an axis."""
    return np.dtype(np.int32 if values.dtype.kind in "iu" else np.float32), values.shape[1] if values.ndim == 2 else 0


def _cells(rows: Sequence[np.ndarray], kind: np.dtype) -> pa.Array:
    """Return each row's values as a cell of bytes."""
    return pa.array([np.ascontiguousarray(row, kind).tobytes() for row in rows], CELL)


class TokenRows:
    """The rows of one row group: its columns as long arrays, of which a row's samples are slices."""

    columnar: ClassVar[bool] = False  # it has no meaning here, because a row is its samples

    def __init__(self, table: pa.Table):
        self.lines, self.nbytes = table.num_rows, table.nbytes
        first_unit, units = _list(table, "units")
        first_sample, lengths = _list(table, "lengths")
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._tokens = _values(table, "tokens", np.int32)[1]
        first_run, runs = _values(table, "weights", np.int32)
        self._run_lengths, self._run_weights = runs[::2].astype(np.int64), runs[1::2].copy().view(np.float32)
        assert len(self._tokens) == ends[-1] == self._run_lengths.sum(), (
            "the columns of a row group differ in their number of tokens"
        )
        assert self._tokens.min(initial=0) >= 0, "a column of tokenized data holds a negative token id"
        # the first pack unit, sample and run of each row, then the end of the last row
        self._first_unit, self._first_sample = first_unit.tolist(), first_sample.tolist()
        self._first_run = (first_run // 2).tolist()
        self._units = units.tolist()  # number of samples of each pack unit
        self._ends = ends.tolist()  # number of tokens before each sample
        self._sources = _list(table, "sources")[1]
        self._token_columns = {
            name.removeprefix(COLUMN_PREFIX): _token_column(table, name)
            for name in table.column_names
            if name.startswith(COLUMN_PREFIX)
        }

    def __len__(self) -> int:
        return self.lines

    def line(self, i: int) -> int:
        """Return the line of row i, which is its number."""
        return i

    def row(self, i: int) -> Row:
        """Return row i."""
        return {"units": self.units(i)}

    def units(self, i: int) -> list[PackUnit]:
        """Return the pack units of row i."""
        first, last = self._first_sample[i], self._first_sample[i + 1]
        before, runs, columns = self._ends[first], slice(*self._first_run[i : i + 2]), self._token_columns
        weights = self._run_weights[runs].repeat(self._run_lengths[runs])
        samples = []
        for k in range(first, last):
            start, end = self._ends[k], self._ends[k + 1]
            own = {name: values[start:end] for name, values in columns.items()}
            samples.append(
                Document(self._tokens[start:end], weights[start - before : end - before], self._sources[k], own)
            )
        remaining = iter(samples)
        return [tuple(islice(remaining, n)) for n in self._units[self._first_unit[i] : self._first_unit[i + 1]]]

    def part(self, start: int, end: int) -> RowBlock:
        """Raise: rows of tokenized data are not tokenized again."""
        raise NotImplementedError("tokenized data cannot be tokenized again")


def placeholder_unit(n: int) -> PackUnit:
    """Return a placeholder of a pack unit with n tokens, which has a length and no content."""
    return (Document(np.zeros(n, np.int32), np.ones(n, np.float32)),)


class LengthRows(TokenRows):
    """The same rows, of which only the lengths of the pack units are read."""

    def __init__(self, table: pa.Table):
        self.lines, self.nbytes = table.num_rows, table.nbytes
        first_unit, units = _list(table, "units")
        ends = np.concatenate([[0], np.cumsum(_list(table, "lengths")[1], dtype=np.int64)])
        samples = np.concatenate([[0], np.cumsum(units, dtype=np.int64)])
        self._first_unit = first_unit.tolist()
        self._of_units = np.diff(ends[samples]).tolist()  # tokens of each pack unit

    def units(self, i: int) -> list[PackUnit]:
        """Return placeholders of the pack units of row i."""
        return [placeholder_unit(n) for n in self._of_units[self._first_unit[i] : self._first_unit[i + 1]]]


def _list(table: pa.Table, name: str) -> tuple[np.ndarray, Any]:
    """Return where each row's values begin, then the end of the last row; and all values.

    Strings come as a list, numbers as an array.
    """
    lists = table.column(name).combine_chunks()
    offsets = _numbers(lists.offsets)
    values = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
    if pa.types.is_string(values.type):
        encoded = values.dictionary_encode()  # a text that comes again is one object
        texts = encoded.dictionary.to_pylist()
        return offsets - offsets[0], [texts[i] for i in encoded.indices.to_pylist()]
    return offsets - offsets[0], _numbers(values)


def _numbers(array: Any) -> np.ndarray:
    """Return an Arrow array of int32 without nulls as a numpy array over the same memory.

    pyarrow's own conversion imports pandas where it is installed, which costs a second of CPU time in every process.
    """
    if not len(array):
        return np.zeros(0, np.int32)
    assert pa.types.is_int32(array.type), f"a column of tokenized data holds {array.type} in place of int32"
    assert not array.null_count, "a column of tokenized data holds nulls"
    return np.frombuffer(array.buffers()[1], np.int32, len(array), array.offset * 4)


def _values(table: pa.Table, name: str, kind: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return where each row's cell begins, then the end of the last one, in values; and what all cells hold."""
    cells = table.column(name).combine_chunks()
    _, ends, data = cells.buffers()
    if data is None:
        return np.zeros(len(cells) + 1, np.int64), np.zeros(0, kind)
    offsets = np.frombuffer(ends, np.int64, len(cells) + 1, cells.offset * 8)
    begins = (offsets - offsets[0]) // np.dtype(kind).itemsize
    return begins, np.frombuffer(data, kind, begins[-1], offsets[0])


def _token_column(table: pa.Table, name: str) -> np.ndarray:
    """Return the per-token values of a name, [tokens] or [tokens, k]."""
    metadata = table.schema.field(name).metadata
    k = int(metadata[b"k"])
    return _values(table, name, metadata[b"kind"].decode())[1].reshape(-1, *([k] if k else []))
