"""Encoded rows as parquet: data are tokenized once, and train as if they were tokenized during training.

One row of parquet is one row of the source with its pack units (none where the row was dropped or bad),
so an epoch has the same samples (in the order of its own blocks). ptf/data/token_file.py defines how a row is stored.
"""

import contextlib
import multiprocessing
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ptf import storage
from ptf.data.encode import COUNTS, Encode, Encoder, TooLong
from ptf.data.kinds import with_detected_kind
from ptf.data.quarantine import BadRow, Quarantine
from ptf.data.sources.blocks import RowBlock
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, SourceSpec, blocks_once
from ptf.data.token_file import FORM, ROWS_IN_GROUP, RowFile, TokenRows, unit_columns
from ptf.data.tokenizer import Tokenizer
from ptf.data.unread import Unread
from ptf.errors import UserError
from ptf.storage import file_verification
from ptf.workspace import progress, scratch
from ptf.workspace.entry import end_with_parent

ROWS_AT_ONCE = 256  # rows that a process receives at a time
FEW_BYTES = 8 << 20  # a smaller source is encoded in one process
BAD_ROWS = "bad_rows.jsonl"

# rows as columns, counts, rows set aside, and names that nothing reads with the places where they appeared
EncodedRows = tuple[list[dict[str, Any]], dict[str, int], list[BadRow], dict[str, str]]


@dataclass
class _Work:
    """Encodes some rows of a block, in this process or in another one."""

    encoder: Encoder  # of which each call has a copy, to count its own rows
    skip_bad: bool
    unread: Unread

    def __call__(self, block: RowBlock, uri: str, before: int) -> EncodedRows:
        bad_rows: list[BadRow] = []
        set_aside = (lambda bad, counts: bad_rows.append(bad)) if self.skip_bad else None
        encoder = replace(self.encoder, set_aside=set_aside, counts=dict.fromkeys(COUNTS, 0))
        rows = [unit_columns(encoder(RawRow(block, i, uri, before))) for i in range(len(block))]
        return rows, encoder.counts, bad_rows, self.unread.names


_work: _Work | None = None  # set at the start of each process of the pool, so it need not be picklable


def _start(work: _Work, parent: int) -> None:
    """Prepare a process of the pool."""
    global _work
    end_with_parent(parent)
    _work, work.unread.say = work, None


def _run(block: RowBlock, uri: str, before: int) -> EncodedRows:
    """Encode some rows in a process of the pool."""
    assert _work is not None
    return _work(block, uri, before)


def write(
    directory: str,
    spec: SourceSpec,
    name: str,
    *,
    encode: Encode,
    seq_len: int,
    too_long: TooLong,
    tokenizer: Tokenizer,
    config_fingerprint: str,
    max_bad_rows_share: float = 0.0,
    processes: int = 1,
    read_keys: Iterable[str] = (),
) -> Mapping[str, Any]:
    """Encode every row of a source into a local directory, and return its manifest.

    A large source is encoded in `processes`. With `max_bad_rows_share`, that share of the rows may be bad; they are
    listed in `bad_rows.jsonl`. The recipe reads `read_keys` of messages; what nothing reads is printed. The manifest is
    written last; where one exists already, from the same tokenizer and config, nothing is done.
    """
    made_with = {**made_by(tokenizer), "config": config_fingerprint}
    root = Path(directory)
    if (root / storage.MANIFEST).exists():
        manifest = file_verification.verify(directory, spec.verify_up_to, f"remove {directory}: it is made again")
        if manifest.items() >= made_with.items():
            return manifest
    with scratch.directory(root) as part:  # other processes may be reading the old files
        (part / "new").mkdir()
        quarantine = Quarantine(part / "new" / BAD_ROWS, max_bad_rows_share)
        reader = Reader(spec.path)
        spec = with_detected_kind(spec, reader)
        unread = Unread(spec, tokenizer, read_keys, partial(print, f"tokenize: source {name}:", flush=True))
        encoder = Encoder(encode, name, spec, seq_len, too_long, unread=unread)
        work = _Work(encoder, max_bad_rows_share > 0, unread)
        with contextlib.closing(RowFile(part / "new" / "rows.parquet")) as file:
            counts = _write_rows(file, work, reader, spec.limit, processes, quarantine)
        made_with |= {"commit": reader.commit} if reader.commit else {}  # the commit of a dataset on the Hub
        manifest = storage.commit(
            part / "new",
            {**made_with, "source": name, **counts, "expansion": counts["tokens"] / max(1, counts["whole"])},
        )
        if root.exists():
            os.replace(root, part / "old")  # of another tokenizer or config, under the same name
        os.replace(part / "new", root)
        return manifest


def _write_rows(
    file: RowFile, work: _Work, reader: Reader, limit: int | None, processes: int, quarantine: Quarantine
) -> Mapping[str, int]:
    """Write what `work` makes of every row, in order and in groups of at least `ROWS_IN_GROUP`; return the counts."""
    in_one_process = processes == 1 or sum(reader.sizes) < FEW_BYTES
    pieces = _pieces(reader, limit)
    encoded = (work(*piece) for piece in pieces) if in_one_process else _in_processes(work, pieces, processes)
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    group: list[dict[str, Any]] = []
    with progress.phase(work.encoder.name, 100, "% of the files") as phase:
        for rows, counted, bad, names in encoded:
            counts.update(counted)
            for row in bad:
                quarantine.add(row, counts)
            work.unread.note(names)
            group += rows
            if len(group) >= ROWS_IN_GROUP:
                file.write(group)
                group = []
            phase.done = 100 * reader.share
    if group:
        file.write(group)
    return counts


def _pieces(reader: Reader, limit: int | None) -> Iterator[tuple[RowBlock, str, int]]:
    """Yield the first `limit` rows of the source in pieces of at most `ROWS_AT_ONCE` rows."""
    for block, file, _, before, rows in blocks_once(reader, limit):
        for at in range(0, rows, ROWS_AT_ONCE):
            yield block.part(at, min(at + ROWS_AT_ONCE, rows)), reader.uris[file], before


def _in_processes(work: _Work, pieces: Iterator[tuple[RowBlock, str, int]], processes: int) -> Iterator[EncodedRows]:
    """Yield encoded pieces in order, at most a few of them ahead.

    Processes are forked, because encoders are often closures.
    """
    with (
        _quiet_forks(),
        ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start, (work, os.getpid())) as pool,
    ):
        pending: deque[Future[EncodedRows]] = deque()
        try:
            for piece in pieces:
                pending.append(pool.submit(_run, *piece))
                if len(pending) > 3 * processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError(f"a process that tokenized {work.encoder.name} died (out of memory?)") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _quiet_forks() -> Iterator[None]:
    """Disable threads of the tokenizers, which warn in a process that is forked after its parent has used them."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def made_by(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the part of the manifest that says how the data were tokenized."""
    return {"tokenizer": tokenizer.identity, "storage": FORM}


def reader(path: str, tokenizer: Tokenizer, verify_up_to: float = float("inf")) -> Reader:
    """Return a reader of tokenized data.

    Raises UserError where another tokenizer wrote them, or where the files changed.
    """
    tokenizer.raise_if_different(whole(path, verify_up_to)["tokenizer"], path)
    return Reader(path, TokenRows)


def whole(path: str, verify_up_to: float) -> dict[str, Any]:
    """Return the manifest of tokenized data, once they are verified (ptf.storage.file_verification).

    Raises UserError that names what is wrong.
    """
    if not storage.exists(f"{path.rstrip('/')}/{storage.MANIFEST}"):
        raise UserError(f"{path} is not tokenized data, or its writing never finished: it has no {storage.MANIFEST}")
    remedy = f"remove {path}: it is made again"
    manifest = file_verification.verify(path, verify_up_to, remedy)
    config, key = manifest.get("config", ""), path.rstrip("/").rpartition("-")[2]
    if "tokenizer" not in manifest or (re.fullmatch("[0-9a-f]{16}", key) and config and config != key):
        raise storage.Corrupt(f"{path} holds other data ({config or 'not tokenized data'}); {remedy}")
    if manifest.get("storage") != FORM:
        raise UserError(
            f"{path} was written by a version of ptf that stored tokenized data in another form; tokenize it again"
        )
    return manifest
