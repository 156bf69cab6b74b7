"""Verification of files that are read again: their sizes and SHA-256 must be those that were written, and the directory
may contain no other file.

A file is not hashed again if its identity is unchanged since it was last hashed: device, inode, size, mtime and ctime
on disk; entity tag and version in an object store. Identities and hashes are stored in one small file per directory
below `PTF_CACHE` (default `~/.cache/ptf`).
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ptf import storage
from ptf.storage import MANIFEST, Corrupt
from ptf.workspace import locks, progress, scratch

FRESH_NS = 100_000_000  # a later write to a file that changed less than this ago may leave its times the same
COARSE_NS = 2_000_000_000  # the same, for file systems that store times in whole seconds
WAIT_S = 600.0  # longest wait for another process that is hashing the same directory; then it goes on without the lock


def verify(
    directory: str,
    up_to: float = float("inf"),
    advice: str = "",
    without: Sequence[str] = (),
    *,
    remembered: bool = True,
) -> dict[str, Any]:
    """Return the manifest of a committed directory or URI after comparing the files there with it.

    Every file is hashed, or with `remembered` those that have changed since they were last hashed. If more than `up_to`
    bytes would have to be hashed, only sizes are compared, and a line on the console reports it. Files whose names
    match a pattern in `without` may be missing. Raise Corrupt, which names the file that is missing, has changed or is
    not in the manifest, and ends with `advice`; raise Missing if nothing is there.
    """
    with _advised(advice):
        manifest = storage.manifest_of(directory)
        entries = {name: e for name, e in manifest["files"].items() if not any(fnmatch(name, p) for p in without)}
        compare(directory, entries, up_to, remembered=remembered)
    return manifest


def make_once(
    target: Path, expected: Mapping[str, Any], make: Callable[[Path], None], up_to: float = float("inf")
) -> bool:
    """Make the directory `target` if it does not exist, and return whether it existed.

    `make(directory)` writes its files; a manifest that contains the entries of `expected` is added. `target` appears
    only when it is complete, even if several processes make it at once. Raise Corrupt if an existing `target` has
    changed since it was written, or if its manifest does not contain `expected`.
    """
    if not target.exists():
        with scratch.directory(target) as part:
            new = part / "new"
            new.mkdir()
            make(new)
            storage.commit(new, dict(expected))
            try:
                new.rename(target)
                return False
            except OSError:  # another process was faster
                if not target.exists():
                    raise
    raise_if_different(str(target), expected, up_to, f"remove {target}: it is made again")
    return True


def of_run(directory: Path) -> dict[str, Any]:
    """Return the manifest entries that identify a directory of a run: the run's name and the directory's.

    They prevent a directory of a different run, or a different directory of this run, from being accepted in its place.
    """
    return {"lineage": directory.parent.name, "directory": directory.name}


def raise_if_different(directory: str, expected: Mapping[str, Any], up_to: float, advice: str) -> None:
    """Raise Corrupt if a committed directory has changed, or if its manifest does not contain the entries `expected`.

    The message ends with `advice`.
    """
    manifest = verify(directory, up_to, advice)
    for key, value in expected.items():
        if manifest.get(key) != value:
            raise Corrupt(
                f"{directory} was made for a different {storage.WORDS.get(key, key)}, {manifest.get(key)}; {advice}"
            )


def localized(uri: str, into: str | os.PathLike[str], up_to: float = float("inf"), without: Sequence[str] = ()) -> str:
    """Copy `uri` with `storage.localize` and verify the copy, which may be from an earlier call. Return its path.

    Raise Corrupt if the copy has changed since it was made, Missing if there is nothing at `uri`.
    """
    local = storage.localize(uri, into, without)
    if not storage.is_local(uri):
        entries = storage.read_record(
            f"{local}{storage.COPIED}",
            f"remove {local} and {Path(local).name}{storage.COPIED}: it is copied again",
            {"copy": Path(local).name},
        )
        with _advised(f"remove {local}: it is copied again"):
            compare(local, entries["files"], up_to, manifest=False)
    return local


def compare(
    directory: str,
    entries: Mapping[str, Mapping[str, Any]],
    up_to: float,
    manifest: bool = True,
    remembered: bool = True,
) -> None:
    """Raise Corrupt unless the files below `directory` are exactly those of `entries` (name → size and SHA-256).

    With `manifest`, the manifest file is allowed too. Without `remembered`, no earlier hash counts. If more than
    `up_to` bytes would have to be hashed, only sizes are compared.
    """
    base = directory.rstrip("/")
    present = storage.file_identities(base)
    for name in sorted(present.keys() - entries.keys()):
        if not (manifest and name == MANIFEST):
            raise Corrupt(f"{base}/{name} does not belong there: it is not one of the files that were written")
    for name, entry in sorted(entries.items()):
        if name not in present:
            raise Corrupt(f"{base}/{name} is missing")
        if present[name][0] != entry["size"]:
            raise Corrupt(f"{base}/{name} has {present[name][0]} bytes, not {entry['size']}")
    with _memory(base) if remembered else contextlib.nullcontext({}) as known:
        unknown = {
            name: entry
            for name, entry in entries.items()
            if not present[name][1] or known.get(name) != [present[name][1], entry["sha256"]]
        }
        size = sum(entry["size"] for entry in unknown.values())
        if size > up_to:
            print(
                f"not verified: {base} has {size / 2**30:.3g} GiB to read, "
                f"more than checkpoint.sha256_max_gib ({up_to / 2**30:.3g}): sizes were compared, "
                "SHA-256 were not",
                flush=True,
            )
            return
        with progress.phase(f"verify {base}", size / 2**20, "MiB") as phase:
            for name, entry in sorted(unknown.items()):
                if _sha256(f"{base}/{name}", phase) != entry["sha256"]:
                    raise Corrupt(f"{base}/{name} has changed: its SHA-256 is not the one that was written")
        if unknown:
            after = storage.file_identities(base)
            now = time.time_ns()
            for name, entry in unknown.items():
                if name in after and after[name] == present[name] and _settled(after[name][1], now):
                    known[name] = [after[name][1], entry["sha256"]]


def _settled(mark: str, now: int) -> bool:
    """Return whether any later write would change the mark (the file's identity).

    Marks of local files end with the ctime in nanoseconds; every write to an object store gives a new mark.
    """
    if not mark.startswith("file "):
        return bool(mark)
    changed = int(mark.rsplit(" ", 1)[1])
    return now - changed > (FRESH_NS if changed % 1_000_000_000 else COARSE_NS)


def _sha256(uri: str, phase: progress.Phase) -> str:
    digest = hashlib.sha256()
    with storage.open_read(uri, 8 << 20) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            phase.advance(len(block) / 2**20)
    return digest.hexdigest()


@contextlib.contextmanager
def _memory(directory: str) -> Iterator[dict[str, list[str]]]:
    """Yield identity and SHA-256 of each file (by name) that was hashed before; entries that the block adds are saved.

    Only one process of this machine is in the block at a time: one of several ranks hashes the files, and the others
    find its hashes.
    """
    place = os.path.realpath(directory) if storage.is_local(directory) else directory
    root = Path(os.environ.get("PTF_CACHE") or Path.home() / ".cache" / "ptf") / "verified"
    file = root / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.locked(file.with_suffix(".lock"), WAIT_S))
        except OSError as error:
            print(
                f"the hashes of verified files cannot be remembered in {root} ({error.strerror}), so every file is "
                "hashed again; set PTF_CACHE to a writable directory",
                flush=True,
            )
            yield {}
            return
        try:
            known = json.loads(file.read_text())
            assert isinstance(known, dict)
        except (OSError, ValueError, AssertionError):
            known = {}
        before = json.dumps(known)
        yield known
        if json.dumps(known) != before:
            storage.write_text(str(file), json.dumps(known))


@contextlib.contextmanager
def _advised(advice: str) -> Iterator[None]:
    try:
        yield
    except Corrupt as error:
        raise Corrupt(f"{error}; {advice}" if advice else str(error)) from None
