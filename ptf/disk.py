"""Disks that are full, read-only or not ours: said in one sentence, with the disk and its room,
wherever a write fails."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ptf.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = {
    errno.EROFS: "its disk is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "the system does not let anyone write there",
    errno.ENOTDIR: "a file is where a directory should be",
    errno.EEXIST: "a file is where a directory should be",
    errno.EISDIR: "a directory is where a file should be",
    errno.ENAMETOOLONG: "the name is too long",
}


@contextlib.contextmanager
def plainly(*places: str | os.PathLike[str]) -> Iterator[None]:
    """Raise UserError for an error of a disk.

    `places` are where the block writes, besides the directory of temporary files. An error of a full disk names no
    file, so the one of these disks with the least room is named.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, UserError):
            raise
        if error.errno in FULL:
            raise UserError(
                full(
                    *([error.filename] if error.filename else places),
                    *([] if error.filename else [tempfile.gettempdir()]),
                )
            ) from error
        if error.errno in REFUSED and isinstance(error.filename, str):
            why = REFUSED[error.errno]
            raise UserError(
                f"{error.filename} cannot be read or written: {why}; choose another place (output, publish.to, "
                "checkpoint.to)"
            ) from error
        raise


def full(*places: str | os.PathLike[str], needed: int | None = None) -> str:
    """Return a sentence about the fullest of the disks that these places are on.

    `needed` is the number of bytes that are to be written there.
    """
    disks = {_mount(Path(place)): shutil.disk_usage(_mount(Path(place))) for place in places}
    mount, room = min(disks.items(), key=lambda item: item[1].free)
    more = "" if needed is None else f" and {needed / 2**30:.2f} GiB are needed"
    return (
        f"no space is left on the disk at {mount}: {room.free / 2**30:.2f} of {room.total / 2**30:.2f} GiB are "
        f"free{more}; make room, or write elsewhere"
    )


def room(place: str | os.PathLike[str]) -> int:
    """Bytes that are free on its disk."""
    return shutil.disk_usage(_mount(Path(place))).free


def _mount(path: Path) -> Path:
    """Where its disk is mounted; of what is not there yet, of the directory that it would be in."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    while not path.is_mount():
        path = path.parent
    return path
