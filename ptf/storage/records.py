"""Records: JSON objects that are stored with a digest of all that they say. The manifest of a directory is one.

A directory's data is written first and its `manifest.json` last. A directory without a manifest was never finished; one
with a manifest can be verified to the byte.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.storage.hashing import digest_of, entry_of
from ptf.storage.listings import MANIFEST, exists, is_inside, names_below
from ptf.storage.reading import read_text
from ptf.storage.store import Corrupt, Missing, is_local
from ptf.storage.writing import flush_directory, write_text

WORDS = {"lineage": "run"}  # stored keys whose word of today differs


def write_record(uri: str, record: dict[str, Any]) -> None:
    """Write a JSON object, and in it a digest of all that it says."""
    write_text(uri, record_text(record))


def record_text(record: dict[str, Any]) -> str:
    """Return a record as the text that is stored, with its digest."""
    return json.dumps({**record, "digest": digest_of(record)})


def parse_record(text: str) -> dict[str, Any]:
    """Return the record in a text.

    Raise ValueError, KeyError, TypeError or AttributeError for a text that is not, to the bit, one of `record_text`.
    """
    stored = json.loads(text)
    if stored.pop("digest") != digest_of(stored):
        raise ValueError
    return stored


def read_record(uri: str, advice: str, expected: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the record that `write_record` wrote to `uri`.

    Raise Corrupt, whose message ends with `advice`, if the file is missing or damaged, or if a value differs from
    `expected`.
    """
    try:
        stored = parse_record(read_text(uri))
    except FileNotFoundError:
        raise Corrupt(f"{uri} is missing; {advice}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Corrupt(f"{uri} is not as it was written; {advice}") from None
    for key, value in expected.items():
        if stored.get(key) != value:
            raise Corrupt(f"{uri} was written for another {WORDS.get(key, key)}, {stored.get(key)}; {advice}")
    return stored


def commit(directory: str | os.PathLike[str], manifest: dict[str, Any]) -> dict[str, Any]:
    """Finish a local directory: flush its files to disk, then write `manifest` with the size and SHA-256 of each.
    Returns what was written."""
    entries: dict[str, dict[str, Any]] = {}
    for name in names_below(directory):
        if name != MANIFEST:
            with open(os.path.join(directory, name), "rb") as stream:
                os.fsync(stream.fileno())
                entries[name] = entry_of(stream)
    return finish(os.fspath(directory), manifest, entries)


def finish(directory: str, manifest: dict[str, Any], entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write the manifest of a directory or URI whose files are on disk and hold what `entries` says (`Hashing.entry`).
    Returns what was written."""
    assert not {"files", "digest"} & manifest.keys(), "finish() fills in `files` and `digest`"
    whole = {**manifest, "files": entries}
    whole["digest"] = digest_of(whole)
    if is_local(directory):
        for folder in {Path(directory, name).parent for name in entries}:
            flush_directory(folder)
    write_text(f"{directory.rstrip('/')}/{MANIFEST}", json.dumps(whole, indent=1))
    return whole


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
            or not all(map(is_inside, manifest["files"]))
            or manifest["digest"] != digest_of(manifest)
        ):
            raise ValueError
    except FileNotFoundError:
        raise Corrupt(f"{base}/{MANIFEST} is missing: the directory was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Corrupt(f"{base}/{MANIFEST} is not a manifest, or is not as it was written") from None
    return manifest
