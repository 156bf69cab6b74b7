"""Copies of whole directories: from this machine to a store, and back."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from ptf.storage.hashing import entry_of
from ptf.storage.listings import exists, is_inside, names_below
from ptf.storage.records import write_record
from ptf.storage.store import Corrupt, Missing, on_disk, retry, store_of
from ptf.storage.writing import replacing
from ptf.workspace import scratch

COPIED = ".files.json"  # after the name of a local copy of a remote directory: what it held when it was complete


def upload(directory: str | os.PathLike[str], uri: str) -> None:
    """Copy a local directory's files to `uri`, the manifest last. Repeating it replaces file by file."""
    files, path = store_of(uri)
    for name in names_below(directory):  # one by one: a repeated recursive put of s3fs nests the directory in itself
        source, target = os.path.join(directory, name), f"{path.rstrip('/')}/{name}"
        if on_disk(files):
            with replacing(Path(target)) as part:
                shutil.copyfile(source, part)
        else:
            retry(files, target, partial(files.put_file, source, target))


def localize(uri: str, into: str | os.PathLike[str], without: Sequence[str] = ()) -> str:
    """Return a local directory with what is at `uri`, but for names that match `without`.

    A local directory is returned as it is, a remote one copied to a place of its own below `into`. The copy appears
    only when it is complete, whoever else makes it at the same time, and is made again only when something at `uri` has
    changed. What it holds is written beside it, for `ptf.storage.file_verification`. Raise Missing if nothing is there.
    """
    files, path = store_of(uri)
    if not retry(files, uri, lambda: files.exists(path)):
        raise Missing(f"no such directory: {uri}")
    if on_disk(files):
        return path
    root = path.rstrip("/") + "/"
    there = retry(files, uri, lambda: files.find(path, detail=True))
    if outside := next((name for name in there if not is_inside(name.removeprefix(root))), None):
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
            retry(files, uri, partial(files.get_file, name, str(target)))
            if target.stat().st_size != entries[name]["size"]:
                raise Corrupt(
                    f"{uri} has changed while it was copied: {name} has {target.stat().st_size} bytes, "
                    f"not {entries[name]['size']}"
                )
        entries = {}
        for name in names_below(part):
            with open(part / name, "rb") as stream:
                entries[name] = entry_of(stream)
        write_record(f"{copy}{COPIED}", {"copy": copy.name, "files": entries})
        try:
            os.replace(part, copy)
        except OSError:
            if not copy.is_dir():  # another process was first
                raise
    return str(copy)
