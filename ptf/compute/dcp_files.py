"""Torch's distributed checkpoints over ptf.storage: on disk or in an object store, and hashed while they are written.

The one idea: DCP asks a small file system for its streams. This one notes the SHA-256 of what passes through, so nothing is read again to
write a manifest.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

from ptf import storage


class Files(FileSystemBase):
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}  # of what was written here, by URI

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with storage.open_read(str(path)) as stream:
                yield stream
            return
        assert mode == "wb", mode
        with storage.create(str(path)) as stream:
            yield stream
        self.entries[str(path)] = stream.entry

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> Any:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        storage.move(str(path), str(new_path))
        self.entries[str(new_path)] = self.entries.pop(str(path))

    def mkdir(self, path: Any) -> None:
        if storage.is_local(str(path)):
            Path(path).mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return storage.exists(str(path))

    def rm_file(self, path: Any) -> None:
        storage.remove(str(path))

    def ls(self, path: Any) -> list[str]:
        return storage.listing(str(path))


def writer(uri: str) -> tuple[FileSystemWriter, Files]:
    """What dcp.save writes with, and where the hashes of this rank's files will be."""
    made, files = FileSystemWriter(uri, sync_files=False), Files()  # our streams are flushed to disk when they are closed
    made.fs, made.path = files, uri  # type: ignore[assignment]  # DCP asks for no more than a FileSystemBase
    return made, files


def reader(uri: str) -> FileSystemReader:
    made = FileSystemReader(uri)
    made.fs, made.path = Files(), uri  # type: ignore[assignment]
    return made
