"""Temporary files and directories beside their destinations, and removal of those that killed processes left there.

A process that uses one holds a lock on it (flock), which the kernel releases when the process dies. A file or directory
whose name begins with `PREFIX` and that no process has locked is therefore garbage, and any process may remove it.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PREFIX = ".partial-"  # `sweep` removes only names that begin with this


@contextlib.contextmanager
def _beside(target: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Yield what `make` creates beside `target`, empty, to work in and then to rename.

    It is removed at the end if it is still there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = target.with_name(f"{PREFIX}{target.name[:100]}.{uuid.uuid4().hex[:12]}")
        make(path)
        if (handle := hold(path)) is not None:
            break
    try:
        yield path
    finally:
        _remove(path)
        os.close(handle)


directory = partial(_beside, make=Path.mkdir)
file = partial(_beside, make=Path.touch)


def hold(path: Path) -> int | None:
    """Lock a file or directory and return the file descriptor; closing it, or the end of the process, unlocks it.

    Return None if `sweep` removed the path before it was locked. On a file system without locks the path stays
    unlocked, and `abandoned` yields False for it.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)  # `sweep` holds this lock only briefly, to check the path or remove it
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    os.close(handle)
    return None


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Yield whether no process holds a path; no process can lock it during the block. False if this is unknown."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def sweep(root: Path, depth: int) -> list[Path]:
    """Remove temporary files that killed processes left in `root` and `depth` levels below it; return their paths."""
    removed: list[Path] = []
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:  # `root` does not exist, or this process may not read it
        return removed
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith(PREFIX):
            with abandoned(path) as free:
                if free:
                    _remove(path)
                    removed.append(path)
        elif depth and entry.is_dir(follow_symlinks=False):
            removed += sweep(path, depth - 1)
    return removed


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
