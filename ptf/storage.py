"""Files on disk and in object stores under one set of functions; only this module imports fsspec.

A directory's data is written first and its `manifest.json` last. A directory without a manifest was never finished; one
with a manifest can be verified to the byte. No file is written in place: a reader gets the old file or the new one.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ptf import scratch
from ptf.errors import UserError

T = TypeVar("T")
MANIFEST = "manifest.json"
COPIED = ".files.json"  # after the name of a local copy of a remote directory: what it held when it was complete
GIVE_UP_S = 300.0  # a store that fails for so long is down
READ_BYTES = 1 << 20  # of one request, unless the reader asks for more
LASTING = (errno.EINVAL, errno.ENOSPC, errno.ENAMETOOLONG)  # errors that a repetition does not mend
# Errors of botocore, aiohttp and httpx, by name: none is imported here.
PASSING = {
    "TransportError",
    "HTTPClientError",
    "ConnectionError",
    "IncompleteReadError",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
}


class Missing(UserError, FileNotFoundError):
    """Nothing is there; the text names the URI."""


class Corrupt(UserError):
    """A committed directory is not what its manifest says; the text names the file."""


def exists(uri: str) -> bool:
    """Return whether there is a file or a directory."""
    files, path = _open(uri)
    return _retry(files, uri, lambda: files.exists(path))


def is_local(uri: str) -> bool:
    """Return whether a URI names a place on this machine's file system."""
    return _local(_open(uri)[0])


def local_path(uri: str) -> Path:
    """Of what lies on this machine's file system."""
    files, path = _open(uri)
    assert _local(files), uri
    return Path(path)


def size(uri: str) -> int:
    """Bytes of a file. Raises Missing."""
    files, path = _open(uri)
    return int(_retry(files, uri, lambda: files.size(path)))


def listing(uri: str) -> list[str]:
    """Files behind a single file, a directory (and all below it) or a glob, sorted.
    Raises Missing if there is no such place."""
    return list(stamps(uri))


def children(uri: str) -> list[str]:
    """Names of the files and directories that lie directly in a directory; none where nothing is."""
    files, path = _open(uri)
    names = _retry(files, uri, lambda: files.ls(path, detail=False) if files.isdir(path) else [])
    return sorted({name.rstrip("/").rpartition("/")[2] for name in names})


# as file systems call it
STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id", "mtime", "last_modified", "LastModified", "updated")


def stamps(uri: str) -> dict[str, str]:
    """Of those files, sorted by name, what changes when one does: its size, and its time or, in an object store,
    its entity tag."""
    files, path = _open(uri)

    def find() -> dict[str, dict[str, Any]]:
        if files.isfile(path):
            return {path: files.info(path)}
        if files.isdir(path):
            return files.find(path, detail=True)
        return {match: about for match, about in files.glob(path, detail=True).items() if about["type"] == "file"}

    entries = _retry(files, uri, find)
    if not entries:
        refuse_no_bucket(uri)
    if not entries and not _retry(files, uri, lambda: files.isdir(path)):
        raise Missing(f"no such file or directory, and no file matches: {uri}")
    if _local(files):
        held = {str(name): os.stat(name) for name in sorted(entries)}  # of what a link leads to
        return {name: f"{info.st_size} {info.st_mtime_ns}" for name, info in held.items()}

    def changes(about):
        return next((str(about[key]) for key in STAMPS if about.get(key)), "")

    return {
        files.unstrip_protocol(name): f"{about['size']} {changes(about)}" for name, about in sorted(entries.items())
    }


def marks(directory: str) -> dict[str, tuple[int, str]]:
    """Of every file below a directory or URI, by its name there: its size, and a text that is another once it has been
    written to; nothing where the store has none."""
    files, path = _open(directory)
    if _local(files):
        held = {name: os.stat(os.path.join(path, name)) for name in _names(path)}  # of what a link leads to
        return {
            name: (s.st_size, f"file {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}")
            for name, s in held.items()
        }
    root = path.rstrip("/") + "/"
    entries = _retry(files, directory, lambda: files.find(path, detail=True))

    def named(about):
        return " ".join(
            str(about[key]) for key in ("ETag", "etag", "VersionId", "version_id", "md5Hash") if about.get(key)
        )

    return {name.removeprefix(root): (int(about["size"]), named(about)) for name, about in entries.items()}


def stamps_below(uri: str) -> tuple[str, dict[str, str]]:
    """`stamps`, and the directory that a directory is, a file is in, or all matches of a glob are below."""
    files, path = _open(uri)
    stamped = stamps(uri)
    if _retry(files, uri, lambda: files.isdir(path)):
        below = path
    elif len(stamped) == 1 and _retry(files, uri, lambda: files.isfile(path)):
        below = path.rpartition("/")[0]
    else:
        below = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
    below = below.rstrip("/") if _local(files) else files.unstrip_protocol(below).rstrip("/")
    return below, stamped


def refuse_no_bucket(uri: str) -> None:
    """Raise Missing where an object store has no bucket of that name.

    A directory of this machine is made when something is written.
    """
    files, path = _open(uri)
    bucket = path.split("/")[0]
    if bucket and not _local(files) and not _retry(files, uri, lambda: files.exists(bucket)):
        raise Missing(f"there is no bucket {bucket!r}: {uri}")


def open_read(uri: str, read_bytes: int = READ_BYTES) -> IO[bytes]:
    """Return a file to read and to seek in.

    A remote one is fetched by ranges of `read_bytes`, each again where the store fails.
    """
    files, path = _open(uri)
    if not _local(files):
        return io.BufferedReader(_Remote(files, path, uri), read_bytes)
    try:
        return files.open(path, "rb")
    except FileNotFoundError:
        raise Missing(f"no such file: {uri}") from None


class Ranged(io.RawIOBase):
    """A file that is read by ranges of bytes; a subclass reads them (`readinto`)."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: any place of the file can be read."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place of the file and return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at


class _Remote(Ranged):
    """A remote file as it was when it was opened: nothing of it is held here."""

    def __init__(self, files: Any, path: str, uri: str) -> None:
        super().__init__(int(_retry(files, uri, lambda: files.size(path))))
        self._files, self._path, self._uri = files, path, uri

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = _retry(self._files, self._uri, lambda: self._files.cat_file(self._path, start=self._at, end=end))
        if len(data) != end - self._at:
            raise Corrupt(
                f"{self._uri} has changed while it was read: {len(data)} bytes at {self._at}, not {end - self._at}"
            )
        buffer[: len(data)] = data
        self._at = end
        return len(data)


def read_text(uri: str) -> str:
    """Return a whole file as it was at one instant. Raise Missing."""
    files, path = _open(uri)
    if not _local(files):
        # one GET: between a size and a range of bytes another file may have come
        return _retry(files, uri, lambda: files.cat_file(path)).decode()
    with open_read(uri) as stream:
        return stream.read().decode()


def write_text(uri: str, text: str) -> None:
    """Write a whole file at once: whoever reads meanwhile, or after a crash, sees the old text or the new one."""
    files, path = _open(uri)
    if _local(files):
        with _replacing(Path(path)) as part:
            part.write_bytes(text.encode())
    else:
        _retry(files, uri, lambda: files.pipe_file(path, text.encode()))  # one PUT


def swap_text(uri: str, text: str, expected: str | None) -> bool:
    """As `write_text`, if the file still holds `expected` (None: if there is none); False where another was first. A
    local file is locked meanwhile, S3 is given the condition; other stores have none,
    and are looked at right before."""
    files, path = _open(uri)
    if _local(files):
        with _locked(Path(path)):
            same = (read_text(uri) if exists(uri) else None) == expected
            if same:
                write_text(uri, text)
        return same
    if expected is None:
        return not exists(uri) and _put_if(files, path, uri, text, {"mode": "create"})
    tag = _retry(files, uri, lambda: files.info(path)).get("ETag")
    # Ceph's gateway wants it without its quotation marks
    conditions = [{"IfMatch": tag}, {"IfMatch": tag.strip('"')}] if tag else [{}]
    return any(read_text(uri) == expected and _put_if(files, path, uri, text, condition) for condition in conditions)


def _put_if(files: Any, path: str, uri: str, text: str, condition: dict[str, str]) -> bool:
    """Whether it was put; not where the store says that the condition does not hold."""
    try:
        _retry(
            files, uri, lambda: files.pipe_file(path, text.encode(), **(condition if "s3" in files.protocol else {}))
        )
    except OSError as error:
        answer = getattr(error.__cause__, "response", None) or {}  # of botocore, below what s3fs makes of it
        if answer.get("Error", {}).get("Code") not in ("PreconditionFailed", "ConditionalRequestConflict"):
            raise
        return False
    return True


class Hashing:
    """A file that is written from its beginning to its end, and what it will be found to hold."""

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


@contextlib.contextmanager
def create(uri: str) -> Iterator[Hashing]:
    """Yield a new file of a directory that a manifest will finish.

    It is on disk when the block ends well, and may be half-written when not.
    """
    files, path = _open(uri)
    if _local(files):
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
    files, path = _open(uri)
    _retry(files, uri, lambda: files.mv(path, _open(new)[1]))


def remove(uri: str) -> None:
    """Remove a file, or a directory with all below it.

    Its manifest goes first, so that nobody takes what is left for whole. Where nothing is, nothing is done.
    """
    files, path = _open(uri)
    for target in (f"{path.rstrip('/')}/{MANIFEST}", path):
        with contextlib.suppress(Missing):
            if _retry(files, uri, partial(files.exists, target)):
                _retry(files, uri, partial(files.rm, target, recursive=True))


def upload(directory: str | os.PathLike[str], uri: str) -> None:
    """Copy a local directory's files to `uri`, the manifest last. Repeating it replaces file by file."""
    files, path = _open(uri)
    for name in _names(directory):  # one by one: a repeated recursive put of s3fs nests the directory in itself
        source, target = os.path.join(directory, name), f"{path.rstrip('/')}/{name}"
        if _local(files):
            with _replacing(Path(target)) as part:
                shutil.copyfile(source, part)
        else:
            _retry(files, target, partial(files.put_file, source, target))


def localize(uri: str, into: str | os.PathLike[str], without: Sequence[str] = ()) -> str:
    """Return a local directory with what is at `uri`, but for names that match `without`.

    A local directory is returned as it is, a remote one copied to a place of its own below `into`. The copy appears
    only when it is complete, whoever else makes it at the same time, and is made again only when something at `uri` has
    changed. What it holds is written beside it, for `ptf.verified`. Raise Missing if nothing is there.
    """
    files, path = _open(uri)
    if not _retry(files, uri, lambda: files.exists(path)):
        raise Missing(f"no such directory: {uri}")
    if _local(files):
        return path
    root = path.rstrip("/") + "/"
    there = _retry(files, uri, lambda: files.find(path, detail=True))
    if outside := next((name for name in there if not _inside(name.removeprefix(root))), None):
        raise Corrupt(f"{uri}: a name in it leads out of it: {outside!r}")
    entries = {
        name: info for name, info in there.items() if not any(fnmatch(name.removeprefix(root), p) for p in without)
    }
    state = json.dumps([uri.rstrip("/"), entries], sort_keys=True, default=str)  # sizes, and times or ETags
    copy = Path(into) / f"{Path(path).name}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    if copy.is_dir() and exists(f"{copy}{COPIED}"):
        return str(copy)
    with scratch.directory(copy) as part:
        for name in entries:
            target = part / name.removeprefix(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            _retry(files, uri, partial(files.get_file, name, str(target)))
            if target.stat().st_size != entries[name]["size"]:
                raise Corrupt(
                    f"{uri} has changed while it was copied: {name} has {target.stat().st_size} bytes, "
                    f"not {entries[name]['size']}"
                )
        entries = {}
        for name in _names(part):
            with open(part / name, "rb") as stream:
                entries[name] = _entry(stream)
        write_record(f"{copy}{COPIED}", {"copy": copy.name, "files": entries})
        try:
            os.replace(part, copy)
        except OSError:
            if not copy.is_dir():  # another process was first
                raise
    return str(copy)


def commit(directory: str | os.PathLike[str], manifest: dict[str, Any]) -> dict[str, Any]:
    """Finish a local directory: flush its files to disk, then write `manifest` with the size and SHA-256 of each.
    Returns what was written."""
    entries: dict[str, dict[str, Any]] = {}
    for name in _names(directory):
        if name != MANIFEST:
            with open(os.path.join(directory, name), "rb") as stream:
                os.fsync(stream.fileno())
                entries[name] = _entry(stream)
    return finish(os.fspath(directory), manifest, entries)


def finish(directory: str, manifest: dict[str, Any], entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write the manifest of a directory or URI whose files are on disk and hold what `entries` says (`Hashing.entry`).
    Returns what was written."""
    assert not {"files", "digest"} & manifest.keys(), "finish() fills in `files` and `digest`"
    whole = {**manifest, "files": entries}
    whole["digest"] = _manifest_digest(whole)
    if is_local(directory):
        for folder in {Path(directory, name).parent for name in entries}:
            _flush(folder)
    write_text(f"{directory.rstrip('/')}/{MANIFEST}", json.dumps(whole, indent=1))
    return whole


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of all that it says."""
    return hashlib.sha256(
        json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True).encode()
    ).hexdigest()


def write_record(uri: str, record: dict[str, Any]) -> None:
    """Write a JSON object, and in it a digest of all that it says."""
    write_text(uri, record_text(record))


def record_text(record: dict[str, Any]) -> str:
    """Return a record as the text that is stored, with its digest."""
    return json.dumps({**record, "digest": _manifest_digest(record)})


def parse_record(text: str) -> dict[str, Any]:
    """Return the record in a text.

    Raise ValueError, KeyError, TypeError or AttributeError for a text that is not, to the bit, one of `record_text`.
    """
    stored = json.loads(text)
    if stored.pop("digest") != _manifest_digest(stored):
        raise ValueError
    return stored


def record(uri: str, mend: str, expected: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return what `write_record` wrote, which says `said`.

    Raise Corrupt with `mend` as the advice where it is missing, not as it was written, or another's.
    """
    try:
        stored = parse_record(read_text(uri))
    except FileNotFoundError:
        raise Corrupt(f"{uri} is missing; {mend}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Corrupt(f"{uri} is not as it was written; {mend}") from None
    for key, value in expected.items():
        if stored.get(key) != value:
            raise Corrupt(f"{uri} was written for another {key}, {stored.get(key)}; {mend}")
    return stored


def manifest_of(directory: str) -> dict[str, Any]:
    """Return the manifest of a committed directory or URI.

    Raise Corrupt where it is missing or not as it was written, Missing if nothing is there.
    """
    if not exists(directory):
        raise Missing(f"no such directory: {directory}")
    base = directory.rstrip("/")
    try:
        manifest = json.loads(read_text(f"{base}/{MANIFEST}"))
        if (
            not isinstance(manifest["files"], dict)
            or not all(map(_inside, manifest["files"]))
            or manifest["digest"] != _manifest_digest(manifest)
        ):
            raise ValueError
    except FileNotFoundError:
        raise Corrupt(f"{base}/{MANIFEST} is missing: the directory was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Corrupt(f"{base}/{MANIFEST} is not a manifest, or is not as it was written") from None
    return manifest


def verify(directory: str, whole_up_to: float = float("inf")) -> dict[str, Any]:
    """Return the manifest of a committed directory or URI, after reading every file.

    Of one with more bytes than `whole_up_to`, sizes alone are compared. Raise Corrupt naming the first file that
    differs, Missing if nothing is there.
    """
    manifest, base = manifest_of(directory), directory.rstrip("/")
    held_bytes = sum(entry["size"] for entry in manifest["files"].values())
    if not (whole := held_bytes <= whole_up_to):
        print(
            f"not verified: {base} has {held_bytes / 2**30:.3g} GiB, more than checkpoint.verify_gib: "
            "sizes were compared, SHA-256 were not",
            flush=True,
        )
    for name, entry in manifest["files"].items():
        try:
            held = size(f"{base}/{name}")
            if held == entry["size"] and whole:
                with open_read(f"{base}/{name}") as stream:
                    if _entry(stream) != entry:
                        raise Corrupt(f"{base}/{name} has changed: its SHA-256 is not the manifest's")
        except FileNotFoundError:
            raise Corrupt(f"{base}/{name} is missing") from None
        if held != entry["size"]:
            raise Corrupt(f"{base}/{name} has {held} bytes, not {entry['size']}")
    return manifest


def _open(uri: str) -> tuple[Any, str]:
    """File system and path. Listings are never cached: other processes write here."""
    try:
        return fsspec.core.url_to_fs(uri, use_listings_cache=False)
    except (ValueError, ImportError) as exc:  # no such protocol, or its package is not installed
        raise UserError(f"cannot open {uri}: {exc}") from exc


def patiently(uri: str, ask: Callable[[], T]) -> T:
    """Return what `ask` gives, asked again as a remote store is; for stores that are not read through this module."""
    return _retry(None, uri, ask)


def _retry(files: Any, uri: str, ask: Callable[[], T]) -> T:
    """Return what a store answers.

    A remote one that fails is asked again after 1, 2, 4, … 30 s, for `GIVE_UP_S` in all, and the console says so; what
    will not change (nothing there, no credentials) is a UserError at once.
    """
    ends, pause = time.monotonic() + GIVE_UP_S, 1.0
    while True:
        try:
            return ask()
        except FileNotFoundError as e:
            raise Missing(
                f"no such file or directory: {uri}" + (f" ({e})" if "bucket" in str(e).lower() else "")
            ) from None
        except Exception as e:
            if "Credentials" in type(e).__name__ or (isinstance(e, PermissionError) and not _local(files)):
                raise UserError(
                    f"no access to {uri}: {e} (are the credentials of this store set in the environment?)"
                ) from None
            if _local(files) or not _passing(e):
                raise
            if time.monotonic() + pause > ends:
                raise UserError(f"{uri}: the store has failed for {GIVE_UP_S:g} s: {type(e).__name__}: {e}") from e
            print(f"{uri}: {type(e).__name__}: {e}; trying again in {pause:g} s", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def _passing(e: Exception) -> bool:
    """Whether an error of a remote store may be gone at the next try."""
    if isinstance(e, OSError):
        return (
            not isinstance(e, PermissionError | FileExistsError | IsADirectoryError | NotADirectoryError)
            and e.errno not in LASTING
        )
    return isinstance(e, TimeoutError) or any(c.__name__ in PASSING for c in type(e).__mro__)


def _local(files: Any) -> bool:
    return isinstance(files, LocalFileSystem)


def _inside(name: str) -> bool:
    """Whether a relative name leads to a place below where it is relative to."""
    return not name.startswith("/") and ".." not in name.split("/")


def _names(directory: str | os.PathLike[str]) -> list[str]:
    """Relative names of all files below a local directory, the manifest last."""
    if not os.path.isdir(directory):
        raise Missing(f"no such directory: {os.fspath(directory)}")
    return _last(str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())


def _last(names: Iterator[str]) -> list[str]:
    return sorted(names, key=lambda name: (name == MANIFEST, name))


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a new file beside `target` that takes its place, flushed to disk, when the block ends well."""
    with scratch.file(target) as part:
        yield part
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, target)
        _flush(target.parent)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process at a time; the lock goes with whoever holds it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_name(f".{target.name}.lock")
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's; to lock it, it need only be read
        handle = os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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
