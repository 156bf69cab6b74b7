"""Reading of files; remote ones are read by ranges of bytes, each fetched again where the store fails."""

import io
import os
from typing import IO, Any

from ptf.storage.store import Corrupt, Missing, on_disk, retry, store_of

READ_BYTES = 1 << 20  # of one request, unless the reader asks for more


def open_read(uri: str, read_bytes: int = READ_BYTES) -> IO[bytes]:
    """Return a file to read and to seek in.

    A remote one is fetched by ranges of `read_bytes`, each again where the store fails.
    """
    files, path = store_of(uri)
    if not on_disk(files):
        return io.BufferedReader(_Remote(files, path, uri), read_bytes)
    try:
        return files.open(path, "rb")
    except FileNotFoundError:
        raise Missing(f"no such file: {uri}") from None


class Ranged(io.RawIOBase):
    """A file that is read by ranges of bytes; a subclass reads them (`_range`)."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: any place of the file can be read."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place of the file and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer from the current position; return how many bytes were read."""
        end = min(self._at + len(buffer), self._size)
        count = max(0, end - self._at)
        if count:
            buffer[:count] = self._range(self._at, end)
            self._at = end
        return count

    def _range(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end`, at least one."""
        raise NotImplementedError


class _Remote(Ranged):
    """A remote file with the size that it had when it was opened. Each read is a request; nothing is cached."""

    def __init__(self, files: Any, path: str, uri: str) -> None:
        super().__init__(int(retry(files, uri, lambda: files.size(path))))
        self._files, self._path, self._uri = files, path, uri

    def _range(self, start: int, end: int) -> bytes:
        data = retry(self._files, self._uri, lambda: self._files.cat_file(self._path, start=start, end=end))
        if len(data) != end - start:
            raise Corrupt(f"{self._uri} has changed while it was read: {len(data)} bytes at {start}, not {end - start}")
        return data


def read_text(uri: str) -> str:
    """Return a whole file as it was at one instant. Raise Missing."""
    files, path = store_of(uri)
    if not on_disk(files):
        # one GET: between a size and a range of bytes another file may have come
        return retry(files, uri, lambda: files.cat_file(path)).decode()
    with open_read(uri) as stream:
        return stream.read().decode()
