"""Files on disk and in object stores under one set of names; fsspec lives here only.

The one idea: data first, `manifest.json` last. A directory without its manifest was never finished; a directory with one can be verified
to the byte. Nothing is written in place: a reader sees the old file or the new one.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ptf.errors import UserError

MANIFEST = "manifest.json"


class Missing(UserError, FileNotFoundError):
    """Nothing is there; the text names the URI."""


class Corrupt(UserError):
    """A committed directory is not what its manifest says; the text names the file."""


def exists(uri: str) -> bool:
    files, path = _open(uri)
    return files.exists(path)


def listing(uri: str) -> list[str]:
    """Files behind a single file, a directory (and all below it) or a glob, sorted. Raises Missing if there is no such place."""
    files, path = _open(uri)
    if files.isfile(path):
        found = [path]
    elif files.isdir(path):
        found = files.find(path)
    else:
        found = [match for match in files.glob(path) if files.isfile(match)]
        if not found:
            raise Missing(f"no such file or directory, and no file matches: {uri}")
    return sorted(str(name) if _local(files) else files.unstrip_protocol(name) for name in found)


def open_read(uri: str) -> IO[bytes]:
    files, path = _open(uri)
    try:
        return files.open(path, "rb")
    except FileNotFoundError:
        raise Missing(f"no such file: {uri}") from None


def read_text(uri: str) -> str:
    with open_read(uri) as stream:
        return stream.read().decode()


def write_text(uri: str, text: str) -> None:
    """Write a whole file at once: whoever reads meanwhile, or after a crash, sees the old text or the new one."""
    files, path = _open(uri)
    if _local(files):
        with _replacing(Path(path)) as part:
            part.write_bytes(text.encode())
    else:
        files.pipe_file(path, text.encode())  # one PUT


def upload(directory: str | os.PathLike[str], uri: str) -> None:
    """Copy a local directory's files to `uri`, the manifest last. Repeating it replaces file by file."""
    files, path = _open(uri)
    for name in _names(directory):  # one by one: a repeated recursive put of s3fs nests the directory in itself
        source, target = os.path.join(directory, name), f"{path.rstrip('/')}/{name}"
        if _local(files):
            with _replacing(Path(target)) as part:
                shutil.copyfile(source, part)
        else:
            files.put_file(source, target)


def localize(uri: str, into: str | os.PathLike[str], without: Sequence[str] = ()) -> str:
    """A local directory with what is at `uri`, but for names that match `without`: a local one as it is, a remote one copied to a place of its
    own below `into`. The copy appears only when it is complete, whoever else makes it at the same time, and is made again only when something
    at `uri` has changed. Raises Missing if nothing is there."""
    files, path = _open(uri)
    if not files.exists(path):
        raise Missing(f"no such directory: {uri}")
    if _local(files):
        return path
    root = path.rstrip("/") + "/"
    found = {name: info for name, info in files.find(path, detail=True).items() if not any(fnmatch(name.removeprefix(root), p) for p in without)}
    state = json.dumps([uri.rstrip("/"), found], sort_keys=True, default=str)  # sizes, and times or ETags
    copy = Path(into) / f"{Path(path).name}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    if copy.is_dir():
        return str(copy)
    part = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
    try:
        for name in found:
            target = part / name.removeprefix(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(target))
        try:
            os.replace(part, copy)
        except OSError:
            if not copy.is_dir():  # another process was first
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return str(copy)


def commit(directory: str | os.PathLike[str], manifest: dict[str, Any]) -> dict[str, Any]:
    """Finish a local directory: flush its files to disk, then write `manifest` with the size and SHA-256 of each. Returns what was written."""
    assert "files" not in manifest, "commit() fills in manifest['files']"
    entries: dict[str, dict[str, Any]] = {}
    for name in _names(directory):
        if name != MANIFEST:
            with open(os.path.join(directory, name), "rb") as stream:
                os.fsync(stream.fileno())
                entries[name] = _entry(stream)
            _flush(Path(directory, name).parent)
    whole = {**manifest, "files": entries}
    write_text(os.path.join(directory, MANIFEST), json.dumps(whole, indent=1))
    return whole


def verify(directory: str) -> dict[str, Any]:
    """The manifest of a committed directory or URI, after reading every file. Raises Corrupt naming the first that differs, Missing if nothing is there."""
    if not exists(directory):
        raise Missing(f"no such directory: {directory}")
    base = directory.rstrip("/")
    try:
        manifest = json.loads(read_text(f"{base}/{MANIFEST}"))
        entries = manifest["files"].items()
    except FileNotFoundError:
        raise Corrupt(f"{base}/{MANIFEST} is missing: the directory was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Corrupt(f"{base}/{MANIFEST} is not a manifest") from None
    for name, entry in entries:
        try:
            with open_read(f"{base}/{name}") as stream:
                held = _entry(stream)
        except FileNotFoundError:
            raise Corrupt(f"{base}/{name} is missing") from None
        if held["size"] != entry["size"]:
            raise Corrupt(f"{base}/{name} has {held['size']} bytes, not {entry['size']}")
        if held != entry:
            raise Corrupt(f"{base}/{name} has changed: its SHA-256 is not the manifest's")
    return manifest


def _open(uri: str) -> tuple[Any, str]:
    """File system and path. Listings are never cached: other processes write here."""
    try:
        return fsspec.core.url_to_fs(uri, use_listings_cache=False)
    except (ValueError, ImportError) as exc:  # no such protocol, or its package is not installed
        raise UserError(f"cannot open {uri}: {exc}") from exc


def _local(files: Any) -> bool:
    return isinstance(files, LocalFileSystem)


def _names(directory: str | os.PathLike[str]) -> list[str]:
    """Relative names of all files below a local directory, the manifest last."""
    if not os.path.isdir(directory):
        raise Missing(f"no such directory: {os.fspath(directory)}")
    return _last(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def _last(names: Iterator[str]) -> list[str]:
    return sorted(names, key=lambda name: (name == MANIFEST, name))


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new file beside `target` that takes its place, flushed to disk, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield part
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, target)
        _flush(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entry(stream: IO[bytes]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    while block := stream.read(1 << 20):
        digest.update(block)
        size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}
