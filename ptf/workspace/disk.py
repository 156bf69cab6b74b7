"""Error messages for writes that fail because a disk is full or read-only, or because the user may not write there.

Each is one sentence that names the disk or the file; if the disk is full, also its free space.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ptf.errors import UserError

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
def disk_errors_as_user_errors(*places: str | os.PathLike[str]) -> Iterator[None]:
    """Raise UserError in place of an OSError that means a full disk or a path that cannot be written.

    `places` are the paths that the block writes to, besides the directory of temporary files. The error of a full disk
    often names no file; then the message names the disk of `places` that has the least free space.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, UserError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                full(
                    *([error.filename] if error.filename else places),
                    *([] if error.filename else [tempfile.gettempdir()]),
                )
            ) from error
        if error.errno in REFUSED and isinstance(error.filename, str):
            raise UserError(
                f"{error.filename} cannot be read or written: {REFUSED[error.errno]}; choose a different "
                "directory (output, publish.to, checkpoint.to)"
            ) from error
        raise


def full(*places: str | os.PathLike[str], needed: int | None = None) -> str:
    """Return the error message for the disk with the least free space among the disks that `places` are on.

    `needed` is the number of bytes to be written there.
    """
    disks = {_mount(Path(place)): shutil.disk_usage(_mount(Path(place))) for place in places}
    mount, room = min(disks.items(), key=lambda item: item[1].free)
    more = "" if needed is None else f" and {needed / 2**30:.2f} GiB are needed"
    return (
        f"no space is left on the disk at {mount}: {room.free / 2**30:.2f} of {room.total / 2**30:.2f} GiB are "
        f"free{more}; make room, or write elsewhere"
    )


def room(place: str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk that `place` is on."""
    return shutil.disk_usage(_mount(Path(place))).free


def _mount(path: Path) -> Path:
    """Return the mount point of a path's disk; if the path does not exist, that of its nearest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    while not path.is_mount():
        path = path.parent
    return path
