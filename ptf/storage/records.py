"""Records: JSON objects that are stored with a digest of all that they say."""

import json
from collections.abc import Mapping
from typing import Any

from ptf.storage.hashing import digest_of
from ptf.storage.reading import read_text
from ptf.storage.store import Corrupt
from ptf.storage.writing import write_text

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
