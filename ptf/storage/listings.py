"""Listings: the files below a URI, their sizes, and stamps that change when a file does."""

import os
import re
from pathlib import Path
from typing import Any

from ptf.storage.store import Missing, on_disk, retry, store_of

MANIFEST = "manifest.json"


def exists(uri: str) -> bool:
    """Return whether there is a file or a directory."""
    files, path = store_of(uri)
    return retry(files, uri, lambda: files.exists(path))


def listing(uri: str) -> list[str]:
    """Return the files that a URI names, sorted: a single file, all files below a directory, or the matches of a glob.

    Raises Missing if there are none.
    """
    return list(change_stamps(uri)[1])


def children(uri: str) -> list[str]:
    """Return the names of the files and directories directly in a directory; none if it does not exist."""
    files, path = store_of(uri)
    names = retry(files, uri, lambda: files.ls(path, detail=False) if files.isdir(path) else [])
    return sorted({name.rstrip("/").rpartition("/")[2] for name in names})


# keys of a listing that change with a file, by the names of various stores; the first that is there is used
STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id", "mtime", "last_modified", "LastModified", "updated")


def change_stamps(uri: str) -> tuple[str, dict[str, str]]:
    """Return the base directory of a URI, and a stamp for each file that `listing` returns, sorted by name.

    The base is the directory itself, the parent of a file, or the directory that all matches of a glob are below. A
    stamp changes when its file does: it is the size with the modification time or, in an object store, the ETag.
    """
    files, path = store_of(uri)

    def find() -> tuple[str, dict[str, dict[str, Any]]]:
        if files.isfile(path):
            return path.rpartition("/")[0], {path: files.info(path)}
        if files.isdir(path):
            return path, files.find(path, detail=True)
        matches = {match: about for match, about in files.glob(path, detail=True).items() if about["type"] == "file"}
        return re.split(r"[*?\[]", path)[0].rpartition("/")[0], matches

    below, entries = retry(files, uri, find)
    if not entries and not on_disk(files):
        require_bucket(uri)
    if not entries and below != path:
        raise Missing(f"no such file or directory, and no file matches: {uri}")
    if on_disk(files):
        # of what a link leads to; what was removed since it was found is not there
        held = {str(name): os.stat(name) for name in sorted(entries) if os.path.lexists(name)}
        return below.rstrip("/"), {name: f"{info.st_size} {info.st_mtime_ns}" for name, info in held.items()}

    def changes(about):
        return next((str(about[key]) for key in STAMPS if about.get(key)), "")

    return files.unstrip_protocol(below).rstrip("/"), {
        files.unstrip_protocol(name): f"{about['size']} {changes(about)}" for name, about in sorted(entries.items())
    }


def file_identities(directory: str) -> dict[str, tuple[int, str]]:
    """Return the size and a version tag of each file below a directory or URI, by its relative name.

    The tag differs after any write to the file; it is empty if the store provides none.
    """
    files, path = store_of(directory)
    if on_disk(files):
        held = {name: os.stat(os.path.join(path, name)) for name in names_below(path)}  # of what a link leads to
        return {
            name: (s.st_size, f"file {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}")
            for name, s in held.items()
        }
    root = path.rstrip("/") + "/"
    entries = retry(files, directory, lambda: files.find(path, detail=True))

    def named(about):
        return " ".join(
            str(about[key]) for key in ("ETag", "etag", "VersionId", "version_id", "md5Hash") if about.get(key)
        )

    return {name.removeprefix(root): (int(about["size"]), named(about)) for name, about in entries.items()}


def require_bucket(uri: str) -> None:
    """Raise Missing where an object store has no bucket of that name.

    A directory of this machine is made when something is written.
    """
    files, path = store_of(uri)
    bucket = path.split("/")[0]
    if bucket and not on_disk(files) and not retry(files, uri, lambda: files.exists(bucket)):
        raise Missing(f"there is no bucket {bucket!r}: {uri}")


def names_below(directory: str | os.PathLike[str]) -> list[str]:
    """Return the relative names of all files below a local directory, the manifest last."""
    if not os.path.isdir(directory):
        raise Missing(f"no such directory: {os.fspath(directory)}")
    names = (str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file())
    return sorted(names, key=lambda name: (name == MANIFEST, name))


def is_inside(name: str) -> bool:
    """Return whether a relative path stays inside its base directory: it has no leading `/` and no `..`."""
    return not name.startswith("/") and ".." not in name.split("/")
