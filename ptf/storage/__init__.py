"""Files on disk and in object stores under one set of functions.

A directory's data is written first and its `manifest.json` last. A directory without a manifest was never finished; one
with a manifest can be verified to the byte. No file is written in place: a reader gets the old file or the new one.

The names below are the interface of the package: callers write `storage.exists(uri)`, whose nouns say what is meant.
"""

from ptf.storage.copies import COPIED, localize, upload
from ptf.storage.hashing import Hashing
from ptf.storage.listings import (
    MANIFEST,
    change_stamps,
    children,
    exists,
    file_identities,
    listing,
    require_bucket,
)
from ptf.storage.reading import READ_BYTES, Ranged, open_read, read_text
from ptf.storage.records import WORDS, commit, finish, manifest_of, parse_record, read_record, record_text, write_record
from ptf.storage.store import Corrupt, Missing, is_local, local_path, retry
from ptf.storage.writing import create, move, remove, swap_text, write_text

__all__ = [
    "COPIED",
    "MANIFEST",
    "READ_BYTES",
    "WORDS",
    "Corrupt",
    "Hashing",
    "Missing",
    "Ranged",
    "change_stamps",
    "children",
    "commit",
    "create",
    "exists",
    "file_identities",
    "finish",
    "is_local",
    "listing",
    "local_path",
    "localize",
    "manifest_of",
    "move",
    "open_read",
    "parse_record",
    "read_record",
    "read_text",
    "record_text",
    "remove",
    "require_bucket",
    "retry",
    "swap_text",
    "upload",
    "write_record",
    "write_text",
]
