"""SHA-256 of files, while they are written and when they are read, and of JSON objects."""

import hashlib
import io
import json
from dataclasses import dataclass, field
from typing import IO, Any


@dataclass(eq=False)
class Hashing(io.IOBase):
    """A stream for writing that computes the SHA-256 and the size of the bytes written to it. Whoever opened the stream
    flushes and closes it."""

    stream: IO[bytes]
    digest: Any = field(default_factory=hashlib.sha256)
    size: int = 0

    def write(self, data: Any) -> int:
        """Write the bytes, add them to the digest, and return their number."""
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        self.stream.write(data)
        return memoryview(data).nbytes

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self.size

    @property
    def entry(self) -> dict[str, Any]:
        """For the `files` of a manifest."""
        return {"size": self.size, "sha256": self.digest.hexdigest()}


def entry_of(stream: Any) -> dict[str, Any]:
    """Return what a manifest says of a file: its size and its SHA-256."""
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size": stream.tell(), "sha256": digest}


def digest_of(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of all that a JSON object says, but for its own `digest`."""
    return hashlib.sha256(
        json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True).encode()
    ).hexdigest()
