"""JSON lines: plain files, where any block can be read by itself, and compressed ones, which are read in order."""

import gzip
import io
import zlib
from typing import IO, cast

import pyarrow as pa

from ptf.data.sources.blocks import Lines, local_path, open_bytes, size_of
from ptf.errors import UserError


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
        return Lines.of(text.split(b"\n")[: -1 if text.endswith(b"\n") else None] if text else [])

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._file.tell() / max(1, self._size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Compressed:
    """A compressed file (`.gz`, `.zst`), in blocks of its decompressed text.

    An earlier block starts again from the beginning.
    """

    def __init__(self, uri: str, lines_bytes: int) -> None:
        self._uri, self._lines_bytes, self._size = uri, lines_bytes, size_of(uri)
        self._open()

    def counts(self) -> None:
        """Return None: counting the rows would take decompressing the whole file."""

    @property
    def share(self) -> float:
        """Return how much of the file is read, between 0 and 1."""
        return self._raw.tell() / max(1, self._size)

    def _open(self) -> None:
        """Open the file at its beginning."""
        self._raw = open_bytes(self._uri)
        self._file = decompressed(self._raw, self._uri)
        self._next = self._line = self._at = 0

    def block(self, number: int) -> Lines | None:
        """Return a block of lines; None after the last."""
        if number < self._next:
            self.close()
            self._open()
        while True:
            texts = self._lines((self._next + 1) * self._lines_bytes)
            self._next += 1
            if not texts and self._at < self._next * self._lines_bytes:
                self._next -= 1
                return None
            if self._next > number:
                return Lines.of(texts)

    def _lines(self, end: int) -> list[bytes]:
        """Return the lines that begin before byte `end` of the decompressed text."""
        texts: list[bytes] = []
        try:
            while self._at < end and (text := self._file.readline()):
                texts.append(text)
                self._at += len(text)
        except UserError:  # an error of the object store
            raise
        except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException, OSError) as e:
            raise UserError(f"{self._uri}: cannot be decompressed after line {self._line + len(texts)}: {e}") from None
        self._line += len(texts)
        return texts

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()


def decompressed(raw: IO[bytes], name: str) -> IO[bytes]:
    """Return a stream of the decompressed content, by the suffix of the file's name."""
    if name.endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"), 1 << 20)
