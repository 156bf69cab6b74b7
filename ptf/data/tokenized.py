"""Encoded rows as parquet: tokenize once, then train as if on the fly.

The one idea: one row of parquet is one row of the source with its atoms (none, where it was dropped). It is then dealt to lanes as the row of
the source would be, so the batches are the same, and whatever reads parquet reads it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ptf import storage
from ptf.data.encode import Encode, Encoder, TooLong
from ptf.data.sample import Atom, dump_atoms, load_atoms
from ptf.data.sources import Place, Row, Source, rows_once
from ptf.errors import UserError

COLUMNS = {"atoms": pa.int32(), "lengths": pa.int32(), "tokens": pa.int32(), "weights": pa.float32(), "sources": pa.string()}  # lists, of each row
ROWS_IN_GROUP = 1024


def write(
    directory: str, path: str, name: str, *, encode: Encode, seq_len: int, too_long: TooLong, tokenizer_fingerprint: str, config_fingerprint: str
) -> Mapping[str, Any]:
    """Encode every row of the source at `path` into a local directory. Returns the manifest, which is written last; where one is there already,
    from the same tokenizer and config, nothing is done."""
    made_with = {"tokenizer": tokenizer_fingerprint, "config": config_fingerprint}
    root = Path(directory)
    if (root / storage.MANIFEST).exists():
        manifest = json.loads((root / storage.MANIFEST).read_text())
        if manifest.items() >= made_with.items():
            return manifest
    root.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))  # others may be reading what is there
    try:
        (part / "new").mkdir()
        encoder = Encoder(encode, name, seq_len, too_long)
        schema = pa.schema([(column, pa.list_(kind)) for column, kind in COLUMNS.items()])
        with pq.ParquetWriter(part / "new" / "rows.parquet", schema, compression="zstd") as file:
            encoded = (_columns(encoder(place)) for place in rows_once(path))
            while group := list(islice(encoded, ROWS_IN_GROUP)):
                file.write_table(pa.Table.from_pylist(group, schema))
        counts = encoder.counts
        manifest = storage.commit(part / "new", {**made_with, "source": name, **counts, "expansion": counts["tokens"] / max(1, counts["whole"])})
        if root.exists():
            os.replace(root, part / "old")  # from another tokenizer or config, under the same name
        os.replace(part / "new", root)
        return manifest
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _columns(atoms: list[Atom]) -> dict[str, Any]:
    columns = dump_atoms(atoms)
    if columns.pop("streams"):
        raise UserError("samples that carry streams cannot be tokenized ahead: set data.pretokenize: false")
    return columns


def _arrays(group: pa.Table, i: int) -> Row:
    row: Row = {column: group.column(column).chunk(0)[i].values.to_numpy(zero_copy_only=False) for column in COLUMNS}
    return row | {"streams": {}}


def decode(row: Row, name: str) -> list[Atom]:
    """The atoms of a row read here; takes the encoder's place."""
    return load_atoms(row)


def source(path: str, tokenizer_fingerprint: str, lane: int, lanes: int) -> Source:
    """A lane's rows, endlessly, for `decode`. Raises UserError where another tokenizer wrote them."""
    _check(path, tokenizer_fingerprint)
    return Source(path, lane, lanes, _arrays)


def places(path: str, tokenizer_fingerprint: str) -> Iterator[Place]:
    """Every row once, for `decode`."""
    _check(path, tokenizer_fingerprint)
    return rows_once(path, _arrays)


def _check(path: str, tokenizer_fingerprint: str) -> None:
    manifest = f"{path.rstrip('/')}/{storage.MANIFEST}"
    if not storage.exists(manifest):
        raise UserError(f"{path} is not tokenized data, or its writing never finished: it has no {storage.MANIFEST}")
    found = json.loads(storage.read_text(manifest)).get("tokenizer")
    if found != tokenizer_fingerprint:
        raise UserError(f"{path} was written with another tokenizer ({str(found)[:12]}…) than the model's ({tokenizer_fingerprint[:12]}…): tokenize it again")
