"""Torch's distributed checkpoints over ptf.storage: on disk or in an object store, and hashed while they are written.

The one idea: DCP asks a small file system for its streams. This one notes the SHA-256 of what passes through, so nothing is read again to
write a manifest. Reading runs no code of the files': DCP's index is a pickle, of which only the names below are resolved, and entries that are not
tensors, which DCP would unpickle, are never read.
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

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


class Reader(FileSystemReader):
    """Tensors alone, from files of the checkpoint's own directory. Raises Corrupt for an index that names anything else."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.fs, self.path = Files(), uri  # type: ignore[assignment]
        with storage.open_read(f"{uri}/{INDEX}") as stream:
            self._index = index_of(stream, f"{uri}/{INDEX}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if others := [item.storage_index.fqn for item in plan.items if item.type is not LoadItemType.TENSOR]:
            raise storage.Corrupt(f"{self.path}: {others[0]} is not a tensor, and nothing else is read from a checkpoint's tensors")
        return super().read_data(plan, planner)


INDEX = ".metadata"
FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
NAMES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),  # of entries that are not tensors, which older checkpoints have; never read
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    *(("torch", name) for name in ("float64", "int64", "int32", "int16", "int8", "uint8", "bool")),  # of components of the user's own
}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def index_of(stream: IO[bytes], name: str) -> Metadata:
    """What DCP wrote of its files, where it is that and nothing more. Raises Corrupt."""
    try:
        found = Unpickler(stream).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise storage.Corrupt(f"{name} is not an index of tensors: {type(error).__name__}: {error}") from None
    if type(found) is not Metadata or not isinstance(found.storage_data, dict) or not isinstance(found.state_dict_metadata, dict):
        raise storage.Corrupt(f"{name} is not an index of tensors")
    for where in found.storage_data.values():
        if type(where) is not _StorageInfo or not isinstance(where.relative_path, str) or not FILE.fullmatch(where.relative_path):
            raise storage.Corrupt(f"{name} names a file that is none of this checkpoint's: {getattr(where, 'relative_path', where)!r}")
        if where.transform_descriptors:
            raise storage.Corrupt(f"{name} asks for transformations of its files ({where.transform_descriptors[0]!r}); ptf writes none")
    return found
