"""Data files in blocks, each read once for all the data partitions of a process.

Where a block begins follows from the file alone (a row group of parquet; the lines that begin in one `LINES_BYTES` of
jsonl). Partitions that are at different rows therefore ask for the same blocks, and a position in a file is a block and
a row in it. Memory holds a few blocks, however large the files are.
"""

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from ptf import storage
from ptf.data.sources.blocks import RowBlock, RowGroup, Tables
from ptf.data.sources.columnar import NumberedBlocks, open_arrow, open_parquet
from ptf.data.sources.csv_rows import Csv
from ptf.data.sources.files import format_of, resolve_files
from ptf.data.sources.in_order import InOrder
from ptf.data.sources.json_array import open_json
from ptf.data.sources.jsonl import Compressed, Jsonl

DataFile = NumberedBlocks | Jsonl | InOrder  # an open file, whose blocks are numbered from 0
LINES_BYTES = 1 << 20  # of text, in a block of a format that has no blocks of its own
KEEP_BYTES = 64 << 20  # of blocks that some partition may still be reading
KEEP_FILES = 16  # open at the same time


class Reader:
    """The blocks of some files, by file and number. The next block of a remote file is fetched ahead."""

    def __init__(self, location: str, of_table: Tables | None = None, columns: list[str] | None = None) -> None:
        """Find the files of a location.

        `of_table` makes the block of a row group of parquet (default: `RowGroup`). Of parquet only the given `columns`
        are read.
        """
        files = resolve_files(location)
        self.path, self.uris, self._of_table = location, list(files.stamps), of_table or RowGroup
        self.sizes, self.commit, self.not_read = files.sizes, files.commit, files.not_read
        self._remote = files.commit is not None or not storage.is_local(self.uris[0])
        self._cache: OrderedDict[tuple[int, int], RowBlock | None] = OrderedDict()  # least recently used first
        self._cached_bytes = 0  # of all cached blocks: with a sum for each block, many small ones cost their square
        # Blocks that some partition still uses, cached or not.
        self._in_use: weakref.WeakValueDictionary[tuple[int, int], RowBlock] = weakref.WeakValueDictionary()
        self._columns = columns
        self._footers: dict[str, Any] = {}  # of parquet files that were opened
        self.reads = 0  # number of blocks read from the files
        self._files: OrderedDict[int, DataFile] = OrderedDict()
        self._lengths: dict[tuple[int, int], int] = {}  # rows of every block that was requested, cached or not
        self._reading = threading.Lock()
        self._ahead: dict[tuple[int, int], Future[RowBlock | None]] = {}  # at most one block that is being fetched

    def block(self, file: int, number: int, following: tuple[int, int] | None = None) -> RowBlock | None:
        """Return a block; None after the last.

        `following` is the (file, block) that will be requested next, by default the next one of the files. Raises
        UserError for a file that cannot be read.
        """
        key = file, number
        if key not in self._cache:
            block = self._in_use.get(key)
            if block is None:
                block = self._fetched(key, following) if self._remote else self._read(key)
                self.reads += block is not None
                if block is not None:
                    self._in_use[key] = block
            self._cache[key] = block
            self._cached_bytes += block.nbytes if block is not None else 0
            self._lengths[key] = len(block) if block is not None else 0
            while len(self._cache) > 2 and self._cached_bytes > KEEP_BYTES:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= dropped.nbytes if dropped is not None else 0
        self._cache.move_to_end(key)
        return self._cache[key]

    def _fetched(self, key: tuple[int, int], following: tuple[int, int] | None) -> RowBlock | None:
        """Return a block of a remote file, and start to fetch the following one."""
        pending = self._ahead.pop(key, None)
        block = self._read(key) if pending is None else pending.result()
        following = following or ((key[0], key[1] + 1) if block is not None else (key[0] + 1, 0))
        if following[0] < len(self.uris) and following not in self._cache and following not in self._ahead:
            self._ahead = {following: Future()}  # a daemon thread, so it does not keep the process alive
            threading.Thread(
                target=self._read_ahead, args=(following, self._ahead[following]), name="ptf-read-ahead", daemon=True
            ).start()
        return block

    def _read_ahead(self, key: tuple[int, int], result: Future[RowBlock | None]) -> None:
        """Read a block in a thread and store it, or its error, in `result`."""
        try:
            result.set_result(self._read(key))
        except BaseException as e:  # the error is raised where the block is requested
            result.set_exception(e)

    def _read(self, key: tuple[int, int]) -> RowBlock | None:
        """Read a block, one thread at a time."""
        with self._reading:
            return self._file(key[0]).block(key[1])

    def counts(self) -> list[list[tuple[int, int]]] | None:
        """Return the rows and lines of every block of every file.

        The result is None where some file would have to be downloaded or decompressed to count them.
        """
        counts: list[list[tuple[int, int]]] = []
        for file in range(len(self.uris)):
            with self._reading:
                counted = self._file(file).counts()
            if counted is None:
                return None
            counts.append(counted)
        return counts

    def _file(self, file: int) -> DataFile:
        """Return an open file, whose name gives its format, and close the one that was not used for longest where too
        many are open. Raises UserError where the file cannot be read."""
        uri = self.uris[file]
        if file not in self._files:
            match format_of(uri):
                case ".parquet":
                    self._files[file] = open_parquet(uri, self._of_table, self._footers, self._columns)
                case ".arrow" | ".feather":
                    self._files[file] = open_arrow(uri)
                case ".jsonl.gz" | ".jsonl.zst":
                    self._files[file] = Compressed(uri, LINES_BYTES)
                case ".csv" | ".csv.gz" | ".csv.zst":
                    self._files[file] = Csv(uri, LINES_BYTES)
                case ".json":
                    self._files[file] = open_json(uri, LINES_BYTES)
                case _:
                    self._files[file] = Jsonl(uri, LINES_BYTES)
            if len(self._files) > KEEP_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(file)
        return self._files[file]

    @property
    def rows(self) -> float:
        """Return the estimated number of rows in all files, from the share that was read so far."""
        return sum(self._lengths.values()) / max(self.share, 1e-9)

    @property
    def share(self) -> float:
        """Return how much of all files is read, going by the newest block; between 0 and 1."""
        if not self._files:
            return 0.0
        file, newest = next(reversed(self._files.items()))
        return (sum(self.sizes[:file]) + newest.share * self.sizes[file]) / max(1, sum(self.sizes))
