"""JSON lines: plain files, where any block can be read by itself, and compressed ones, which are read in order."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import IO, cast

import pyarrow as pa

from ptf.data.sources.blocks import Lines, local_path, open_bytes
from ptf.data.sources.in_order import InOrder
from ptf.errors import UserError

NOT_DECOMPRESSED = (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException, OSError)


class Jsonl:
    """A plain file. Block n holds the lines that begin in the n-th `lines_bytes` of the file."""

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._local = local_path(uri) is not None
        # A block is one request, unless its last line is longer than this margin.
        self._file = open_bytes(uri, lines_bytes + (64 << 10))
        self._lines_bytes, self._size = lines_bytes, self._file.seek(0, 2)

    def counts(self) -> list[tuple[int, int]] | None:
        """Return the rows and lines of every block of a local file, which is read for that; None for a remote one."""
        if not self._local:
            return None
        blocks = (self.block(number) for number in range(-(-self._size // self._lines_bytes)))
        return [(len(block), block.lines) for block in blocks if block is not None]

    def block(self, number: int) -> Lines | None:
        """Return a block of lines; None after the last."""
        start, file = number * self._lines_bytes, self._file
        if start >= self._size:
            return None
        file.seek(max(0, start - 1))
        if start:
            file.readline()  # the end of a line that began in an earlier block
        room = start + self._lines_bytes - file.tell()
        text = file.read(room) if room > 0 else b""
        if text and not text.endswith(b"\n"):
            text += file.readline()
        lines = text.split(b"\n")[: -1 if text.endswith(b"\n") else None] if text else []
        full = [i for i, line in enumerate(lines) if line.strip()]  # empty lines hold no row
        texts = lines if len(full) == len(lines) else [lines[i] for i in full]
        return Lines(texts, range(len(lines)) if texts is lines else full, len(lines), sum(map(len, texts)))

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._file.tell() / max(1, self._size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Compressed(InOrder):
    """A compressed file (`.gz`, `.zst`) of lines."""

    def _rows(self) -> Iterator[tuple[bytes, int]]:
        file = decompressed(self._file, self._uri)
        try:
            while text := file.readline():
                self._at, self._line = self._at + len(text), self._line + 1
                yield text if text.strip() else b"", self._line - 1
        except UserError:  # an error of the object store
            raise
        except NOT_DECOMPRESSED as e:
            raise UserError(f"{self._uri}: cannot be decompressed after line {self._line}: {e}") from None


def decompressed(raw: IO[bytes], name: str) -> IO[bytes]:
    """Return a stream of the decompressed content, by the suffix of the file's name; of others the stream itself."""
    if name.endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if not name.endswith(".zst"):
        return raw
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"), 1 << 20)
