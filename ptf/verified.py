"""Verification of files that are read again: their sizes and SHA-256 must be those that were written, and no other file
may be there.

A file is not hashed again if its identity is unchanged since the last time: device, inode, size, mtime and ctime on
disk; entity tag and version in an object store. Identities and hashes are remembered in one small file per directory
below `PTF_CACHE` (default `~/.cache/ptf`).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ptf import scratch, storage
from ptf.storage import MANIFEST, Corrupt

FRESH_NS = 100_000_000  # a file younger than this may be written to once more under the same times
COARSE_NS = 2_000_000_000  # where the file system keeps whole seconds
WAIT_S = 600.0  # for another process that hashes the same directory


def verify(directory: str, up_to: float = float("inf"), mend: str = "", without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the manifest of a committed directory or URI that holds exactly what it says.

    Where more than `up_to` bytes had to be hashed, sizes alone are compared, and the console says so. Names that match
    `without` may be missing. Raise Corrupt naming the file that is missing, other or not of it, with `mend` as the
    advice; Missing if nothing is there.
    """
    with _advised(mend):
        manifest = storage.manifest_of(directory)
        compare(directory, {name: entry for name, entry in manifest["files"].items() if not _any(name, without)}, up_to)
    return manifest


def make_once(
    target: Path, expected: Mapping[str, Any], make: Callable[[Path], None], up_to: float = float("inf")
) -> bool:
    """Make `target` where it is not there yet, and return whether it was.

    It holds what `make(directory)` writes and a manifest that says `said`, and appears when it is complete, whoever
    else makes it. Raise Corrupt where it is not what was written, or was made for something else.
    """
    if target.exists():
        return _verify_existing(target, expected, up_to)
    with scratch.directory(target) as part:
        new = part / "new"
        new.mkdir()
        make(new)
        storage.commit(new, dict(expected))
        try:
            new.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
            return _verify_existing(target, expected, up_to)
    return False


def _verify_existing(target: Path, expected: Mapping[str, Any], up_to: float) -> bool:
    refuse_other(str(target), expected, up_to, f"remove {target}: it is made again")
    return True


def of_run(directory: Path) -> dict[str, Any]:
    """Return what the manifest of a directory in a run's says.

    By it neither another run's directory nor another of this run's is taken for it.
    """
    return {"lineage": directory.parent.name, "directory": directory.name}


def refuse_other(directory: str, expected: Mapping[str, Any], up_to: float, mend: str) -> None:
    """Raise Corrupt unless a committed directory holds what was written there.

    Its manifest must say `said`.
    """
    manifest = verify(directory, up_to, mend)
    for key, value in expected.items():
        if manifest.get(key) != value:
            raise Corrupt(f"{directory} holds what was made for another {key}, {manifest.get(key)}; {mend}")


def localized(uri: str, into: str | os.PathLike[str], up_to: float = float("inf"), without: Sequence[str] = ()) -> str:
    """`storage.localize`; a copy that is used again must hold what was copied. Raises Corrupt, Missing."""
    local = storage.localize(uri, into, without)
    if not storage.is_local(uri):
        mend = f"remove {local}: it is copied again"
        entries = storage.record(
            f"{local}{storage.COPIED}",
            f"remove {local} and {Path(local).name}{storage.COPIED}: it is copied again",
            {"copy": Path(local).name},
        )
        with _advised(mend):
            compare(local, entries["files"], up_to, manifest=False)
    return local


def compare(directory: str, entries: Mapping[str, Mapping[str, Any]], up_to: float, manifest: bool = True) -> None:
    """Raise Corrupt unless the files below are those of `entries` (name → size and SHA-256), and no others.

    With `manifest`, the manifest may be there too.
    """
    base = directory.rstrip("/")
    present = storage.marks(base)
    for name in sorted(present.keys() - entries.keys()):
        if not (manifest and name == MANIFEST):
            raise Corrupt(f"{base}/{name} does not belong there: it is not one of the files that were written")
    for name, entry in sorted(entries.items()):
        if name not in present:
            raise Corrupt(f"{base}/{name} is missing")
        if present[name][0] != entry["size"]:
            raise Corrupt(f"{base}/{name} has {present[name][0]} bytes, not {entry['size']}")
    with _memory(base) as known:
        unknown = {
            name: entry
            for name, entry in entries.items()
            if not present[name][1] or known.get(name) != [present[name][1], entry["sha256"]]
        }
        size = sum(entry["size"] for entry in unknown.values())
        if size > up_to:
            print(
                f"not verified: {base} has {size / 2**30:.3g} GiB to read, "
                f"more than checkpoint.verify_gib ({up_to / 2**30:.3g}): sizes were compared, "
                "SHA-256 were not",
                flush=True,
            )
            return
        for name, entry in sorted(unknown.items()):
            if _sha256(f"{base}/{name}") != entry["sha256"]:
                raise Corrupt(f"{base}/{name} has changed: its SHA-256 is not the one that was written")
        if unknown:
            after = storage.marks(base)
            now = time.time_ns()
            for name, entry in unknown.items():
                if name in after and after[name] == present[name] and _settled(after[name][1], now):
                    known[name] = [after[name][1], entry["sha256"]]


def _settled(mark: str, now: int) -> bool:
    """Whether a later write would show. Marks of files here end with their ctime in nanoseconds;
    those of object stores are always others."""
    if not mark.startswith("file "):
        return bool(mark)
    changed = int(mark.rsplit(" ", 1)[1])
    return now - changed > (FRESH_NS if changed % 1_000_000_000 else COARSE_NS)


def _sha256(uri: str) -> str:
    digest = hashlib.sha256()
    with storage.open_read(uri, 8 << 20) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _memory(directory: str) -> Iterator[dict[str, list[str]]]:
    """Name → identity and SHA-256, of files that were hashed before; what the block adds is kept. One process of this
    machine at a time, so that of several ranks one reads and the others know."""
    place = os.path.realpath(directory) if storage.is_local(directory) else directory
    root = Path(os.environ.get("PTF_CACHE") or Path.home() / ".cache" / "ptf") / "verified"
    file = root / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        print(
            f"what is verified cannot be remembered in {root} ({error.strerror}): every file is read again; "
            "PTF_CACHE names another place",
            flush=True,
        )
        yield {}
        return
    try:
        _wait(handle)
        try:
            known = json.loads(file.read_text())
            assert isinstance(known, dict)
        except (OSError, ValueError, AssertionError):
            known = {}
        before = json.dumps(known)
        yield known
        if json.dumps(known) != before:
            storage.write_text(str(file), json.dumps(known))
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # for a process that was forked meanwhile has the file open, too
        os.close(handle)


def _wait(handle: int) -> None:
    """For whoever hashes the same files; after `WAIT_S` without him."""
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
    return None


@contextlib.contextmanager
def _advised(mend: str) -> Iterator[None]:
    try:
        yield
    except Corrupt as error:
        raise Corrupt(f"{error}; {mend}" if mend else str(error)) from None


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
