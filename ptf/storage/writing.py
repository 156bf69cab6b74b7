"""Writing of files. None is written in place: a reader gets the old file or the new one."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ptf.storage.hashing import Hashing
from ptf.storage.listings import MANIFEST, exists
from ptf.storage.reading import read_text
from ptf.storage.store import Missing, on_disk, retry, store_of
from ptf.workspace import locks, scratch


def write_text(uri: str, text: str) -> None:
    """Write a whole file atomically: a reader, also after a crash, sees the old text or the new one."""
    files, path = store_of(uri)
    if on_disk(files):
        with replacing(Path(path)) as part:
            part.write_bytes(text.encode())
    else:
        retry(files, uri, lambda: files.pipe_file(path, text.encode()))  # one PUT


def swap_text(uri: str, text: str, expected: str | None) -> bool:
    """Compare-and-swap: write `text` only if the file holds `expected` (None: if there is no file).

    Return whether it was written. Local files are locked meanwhile and S3 gets a conditional PUT; other stores are only
    read just before the write, so two writers can both succeed there.
    """
    files, path = store_of(uri)
    if on_disk(files):
        with locks.locked(Path(path).with_name(f".{Path(path).name}.lock")):
            same = (read_text(uri) if exists(uri) else None) == expected
            if same:
                write_text(uri, text)
        return same
    if expected is None:
        return not exists(uri) and _put_if(files, path, uri, text, {"mode": "create"})
    tag = retry(files, uri, lambda: files.info(path)).get("ETag")
    # Ceph's gateway wants it without its quotation marks
    conditions = [{"IfMatch": tag}, {"IfMatch": tag.strip('"')}] if tag else [{}]
    return any(read_text(uri) == expected and _put_if(files, path, uri, text, condition) for condition in conditions)


def _put_if(files: Any, path: str, uri: str, text: str, condition: dict[str, str]) -> bool:
    """Put a text under a condition, and return whether the store found that it holds."""
    try:
        retry(files, uri, lambda: files.pipe_file(path, text.encode(), **(condition if "s3" in files.protocol else {})))
    except OSError as error:
        answer = getattr(error.__cause__, "response", None) or {}  # of botocore, below what s3fs makes of it
        if answer.get("Error", {}).get("Code") not in ("PreconditionFailed", "ConditionalRequestConflict"):
            raise
        return False
    return True


@contextlib.contextmanager
def create(uri: str) -> Iterator[Hashing]:
    """Yield a new file of a directory that a manifest will finish.

    It is on disk when the block ends well, and may be half-written when not.
    """
    files, path = store_of(uri)
    if on_disk(files):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as stream:
            yield Hashing(stream)
            stream.flush()
            os.fsync(stream.fileno())
    else:
        with files.open(path, "wb") as stream:
            yield Hashing(stream)


def move(uri: str, new: str) -> None:
    """Give a file another name on the same store."""
    files, path = store_of(uri)
    retry(files, uri, lambda: files.mv(path, store_of(new)[1]))


def remove(uri: str) -> None:
    """Remove a file, or a directory with all below it.

    Its manifest goes first, so that nobody takes what is left for whole. Where nothing is, nothing is done.
    """
    files, path = store_of(uri)
    for target in (f"{path.rstrip('/')}/{MANIFEST}", path):
        with contextlib.suppress(Missing):
            if retry(files, uri, partial(files.exists, target)):
                retry(files, uri, partial(files.rm, target, recursive=True))


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new file beside `target` that takes its place, flushed to disk, when the block ends well."""
    with scratch.file(target) as part:
        yield part
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, target)
        flush_directory(target.parent)


def flush_directory(directory: Path) -> None:
    """Flush the names of a directory's files to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
