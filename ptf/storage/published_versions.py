"""Versions of a model below one directory or URI, and `latest.json`, the pointer to the current one.

A version is never changed and never removed here. Publishing and rolling back only replace the pointer, by
compare-and-swap: if somebody else has changed it since it was read, nothing is written, and the caller reads it again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptf import storage
from ptf.errors import UserError
from ptf.storage import Corrupt, file_verification

POINTER = "latest.json"


@dataclass(frozen=True)
class Pointer:
    """The version that is published now, and those that were before it."""

    version: str
    before: tuple[str, ...] = ()  # earlier versions, oldest first; a rollback goes to the last one


def pointer(root: str) -> Pointer | None:
    """Return what is published; None where nothing is. Raises Corrupt for a pointer that cannot be read."""
    text = _text(root)
    return None if text is None else _read(root, text)


def latest(root: str) -> str | None:
    """Return the directory or URI of the current version; None where nothing is published. Raises Corrupt if the
    version is not complete."""
    stored = manifest(root)
    return f"{root}/{stored['version']}" if stored else None


def manifest(root: str) -> dict[str, Any] | None:
    """Return the manifest of the current version; None where nothing is published. Raises Corrupt if the version is not
    complete."""
    if (current := pointer(root)) is None:
        return None
    try:
        stored = storage.manifest_of(f"{root}/{current.version}")
        if stored.get("version") != current.version:
            raise Corrupt(
                f"{root}/{current.version} holds another version, {stored.get('version')}; "
                f"ptf publish {root} --rollback VERSION goes back to one"
            )
        return stored
    except storage.Missing:
        raise Corrupt(
            f"{root}/{POINTER} names {current.version}, which is not there; ptf publish {root} --list says what is"
        ) from None


def point(root: str, version: str, seen: Pointer | None) -> bool:
    """Set the pointer to `version` if it still is `seen`; return whether it names `version` afterwards."""
    now = _text(root)
    _check_name(version)
    if (None if now is None else _read(root, now)) != seen:
        return False
    if seen and seen.version == version:
        return True
    return _move(root, Pointer(version, (*seen.before, seen.version) if seen else ()), now)


def versions(root: str) -> list[str]:
    """Return the names of the finished versions, sorted. Raises Missing if there is no such directory."""
    base = str(Path(root).resolve()) if storage.is_local(root) else root.rstrip("/")
    files = (
        name.removesuffix(f"/{storage.MANIFEST}").rsplit("/", 1)
        for name in storage.listing(base)
        if name.endswith(f"/{storage.MANIFEST}")
    )
    return sorted(version for above, version in files if above.rsplit("/", 1)[-1] == base.rsplit("/", 1)[-1])


def roll_back(root: str, to: str | None = None) -> Pointer:
    """Let the pointer name an earlier version, by default the one before, after reading all of its files. Raises
    UserError if there is none, Corrupt if it is not what was published."""
    now = _text(root)
    if to is not None:
        _check_name(to)
    elif now is None:
        raise UserError(f"nothing is published in {root}")
    try:
        seen = Pointer(to or "") if now is None else _read(root, now)
    except Corrupt:
        if to is None:
            raise
        seen = Pointer(to)  # written anew
    if to is None and not seen.before:
        raise UserError(
            f"{root}: {seen.version} is the only version that was published there; there is nothing to go back to"
        )
    if to is None and not storage.exists(f"{root}/{seen.version}"):
        raise Corrupt(
            f"{root}/{POINTER} names {seen.version}, which is not there; "
            f"ptf publish {root} --rollback VERSION goes to one that is"
        )
    to = to or seen.before[-1]
    try:
        if (held := file_verification.verify(f"{root}/{to}").get("version")) != to:
            raise Corrupt(f"{root}/{to} holds another version, {held}")
    except storage.Missing:
        raise UserError(f"{root} has no version {to}; it has {', '.join(versions(root))}") from None
    last = len(seen.before) - 1 - seen.before[::-1].index(to) if to in seen.before else None
    before = (*seen.before, seen.version) if last is None else seen.before[:last]
    wanted = seen if to == seen.version else Pointer(to, before)
    if not _move(root, wanted, now):
        raise UserError(
            f"{root}: somebody else has just published or rolled back; look at it (ptf publish {root} --list) "
            "and try again"
        )
    return wanted


def raise_if_damaged(directory: Path, path: str, up_to: float, without: Sequence[str] = ()) -> None:
    """Raise Corrupt where a local directory, or a copy of `path`, is not what was published there. A model that ptf
    did not publish has no manifest to compare it with."""
    try:
        stored = json.loads((directory / storage.MANIFEST).read_text())
    except FileNotFoundError:
        return
    except ValueError:
        stored = {"digest": None}  # whose manifest it is cannot be known: the check below names it
    if not (isinstance(stored, dict) and stored.keys() & {"digest", "files"}):
        print(
            f"not verified: {directory}/{storage.MANIFEST} is not ptf's, "
            f"so nothing is known of what {directory} should hold",
            flush=True,
        )
        return
    held = file_verification.verify(
        str(directory), up_to, "ptf publish … --rollback goes back to another version", without
    )
    root, _, name = path.rstrip("/").rpartition("/")
    if held.get("version") != name and root and storage.exists(f"{root}/{POINTER}"):  # elsewhere it may have any name
        raise Corrupt(f"{path} holds another version, {held.get('version')}")


def _move(root: str, wanted: Pointer, now: str | None) -> bool:
    text = storage.record_text({"version": wanted.version, "before": list(wanted.before)})
    # the store's reply to our own write may have been lost
    return storage.swap_text(f"{root}/{POINTER}", text, now) or pointer(root) == wanted


def _text(root: str) -> str | None:
    try:
        return storage.read_text(f"{root}/{POINTER}")
    except storage.Missing:
        return None
    except (UnicodeDecodeError, IsADirectoryError, PermissionError) as error:
        raise Corrupt(
            f"{root}/{POINTER} cannot be read ({type(error).__name__}); remove it, "
            f"and ptf publish {root} --rollback VERSION writes it anew"
        ) from None


def _read(root: str, text: str) -> Pointer:
    try:
        # one that was written by hand has none
        stored = storage.parse_record(text) if '"digest"' in text else json.loads(text)
        version, before = stored["version"], tuple(stored.get("before", ()))
        if not all(map(_is_name, (version, *before))) or stored.keys() - {"version", "before"}:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Corrupt(
            f'{root}/{POINTER} is not a pointer ({{"version": …}}); ptf publish {root} --rollback VERSION writes it '
            "anew"
        ) from None
    return Pointer(version, before)


def _is_name(version: object) -> bool:
    return isinstance(version, str) and "/" not in version and version not in ("", ".", "..")


def _check_name(version: str) -> None:
    if not _is_name(version):
        raise UserError(f"{version!r} is not the name of a version, which has no slash in it")
