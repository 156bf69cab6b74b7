"""SHA-256 of files, while they are written and when they are read, and of JSON objects."""

import hashlib
import json
from typing import IO, Any


class Hashing:
    """A stream for writing that computes the SHA-256 and the size of the bytes written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest, self._size = stream, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write the bytes, add them to the digest, and return their number."""
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        self._stream.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._size

    def flush(self) -> None:
        """Flush the file below."""
        self._stream.flush()

    def close(self) -> None:
        """Whoever opened it closes it."""

    @property
    def entry(self) -> dict[str, Any]:
        """For the `files` of a manifest."""
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def entry_of(stream: Any) -> dict[str, Any]:
    """Return what a manifest says of a file: its size and its SHA-256."""
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size": stream.tell(), "sha256": digest}


def digest_of(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of all that a JSON object says, but for its own `digest`."""
    return hashlib.sha256(
        json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True).encode()
    ).hexdigest()
