"""Torch's distributed checkpoints over ptf.storage: on disk or in an object store, and hashed while they are written.

DCP opens its files through a small file-system interface. This implementation computes the SHA-256 of what passes
through, so nothing is read again to write a manifest. Reading runs no code of the files: DCP's index is a pickle, of
which only the names below are resolved, and entries that are not tensors, which DCP would unpickle, are never read.
"""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from ptf import storage


@dataclass(eq=False)
class Files(FileSystem):
    """DCP's file-system interface over ptf.storage, as far as DCP uses it here."""

    # size and SHA-256 of each file written here, by URI
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for reading or writing; the hash of a written file is recorded."""
        if mode == "rb":
            with storage.open_read(str(path)) as stream:
                yield stream
            return
        assert mode == "wb", mode
        with storage.create(str(path)) as stream:
            yield stream
        self.entries[str(path)] = stream.entry

    def concat_path(self, path: Any, suffix: str) -> str:
        """Join a directory and a name."""
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        """Move a file and its entry."""
        storage.move(str(path), str(new_path))
        self.entries[str(new_path)] = self.entries.pop(str(path))

    def mkdir(self, path: Any) -> None:
        """Create a directory on disk; object stores need none."""
        if storage.is_local(str(path)):
            Path(path).mkdir(parents=True, exist_ok=True)

    def exists(self, path: Any) -> bool:
        """Return whether the file exists."""
        return storage.exists(str(path))


class TensorReader(FileSystemReader):
    """A reader of tensors, from files of the checkpoint's own directory.

    Raises Corrupt for an index that names anything else.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.fs, self.path = Files(), uri
        with storage.open_read(f"{uri}/{INDEX}") as stream:
            self._index = index_of(stream, f"{uri}/{INDEX}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned tensors. Raises Corrupt for anything but tensors."""
        if others := [item.storage_index.fqn for item in plan.items if item.type is not LoadItemType.TENSOR]:
            raise storage.Corrupt(f"{self.path}: {others[0]} is not a tensor; only tensors are read from a checkpoint")
        return super().read_data(plan, planner)


INDEX = ".metadata"
FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
NAMES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    # tensor types of the user's own components
    *(("torch", name) for name in ("float64", "int64", "int32", "int16", "int8", "uint8", "bool")),
}


class Unpickler(pickle.Unpickler):
    """An unpickler that resolves only the names of DCP's index."""

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name of the list, or raise UnpicklingError."""
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")
        return super().find_class(module, name)


def index_of(stream: IO[bytes], name: str) -> Metadata:
    """Read DCP's index. Raises Corrupt if it names anything but tensors in files of the checkpoint."""
    try:
        index = Unpickler(stream).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise storage.Corrupt(f"{name} is not an index of tensors: {type(error).__name__}: {error}") from None
    if (
        type(index) is not Metadata
        or not isinstance(index.storage_data, dict)
        or not isinstance(index.state_dict_metadata, dict)
    ):
        raise storage.Corrupt(f"{name} is not an index of tensors")
    for info in index.storage_data.values():
        if (
            type(info) is not _StorageInfo
            or not isinstance(info.relative_path, str)
            or not FILE.fullmatch(info.relative_path)
        ):
            raise storage.Corrupt(
                f"{name} names a file that is not of this checkpoint: {getattr(info, 'relative_path', info)!r}"
            )
        if info.transform_descriptors:
            raise storage.Corrupt(
                f"{name} needs transformations of its files ({info.transform_descriptors[0]!r}); ptf writes none"
            )
    return index
