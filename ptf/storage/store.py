"""The store behind a URI: a local disk or an object store. Only this module imports fsspec, when it is needed: commands
that read no data start without it and its event loops.

A remote store that fails is asked again for some minutes before the failure is an error.
"""

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ptf.errors import UserError

T = TypeVar("T")
GIVE_UP_S = 300.0  # a store that fails for so long is down
# Errors of botocore, aiohttp and httpx, by name: none is imported here.
PASSING = {
    "TransportError",
    "HTTPClientError",
    "ConnectionError",
    "IncompleteReadError",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
}


class Missing(UserError, FileNotFoundError):
    """Nothing is there; the text names the URI."""


class Corrupt(UserError):
    """A committed directory is not what its manifest says; the text names the file."""


def store_of(uri: str) -> tuple[Any, str]:
    """Return the file system and the path. Listings are never cached: other processes write here."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(uri, use_listings_cache=False)
    except (ValueError, ImportError) as exc:  # no such protocol, or its package is not installed
        raise UserError(f"cannot open {uri}: {exc}") from exc


def on_disk(files: Any) -> bool:
    """Return whether a file system is this machine's."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(files, LocalFileSystem)


def is_local(uri: str) -> bool:
    """Return whether a URI names a place on this machine's file system."""
    return on_disk(store_of(uri)[0])


def local_path(uri: str) -> Path:
    """Return the local path of a URI on this machine's file system."""
    files, path = store_of(uri)
    assert on_disk(files), uri
    return Path(path)


def retry(files: Any, uri: str, ask: Callable[[], T]) -> T:
    """Return what a store answers; `files` is its file system, or None for one that is not read through this package.

    A remote one that fails is asked again after 1, 2, 4, … 30 s, for `GIVE_UP_S` in all, and the console says so; what
    will not change (nothing there, no credentials) is a UserError at once.
    """
    ends, pause = time.monotonic() + GIVE_UP_S, 1.0
    while True:
        try:
            return ask()
        except FileNotFoundError as e:
            raise Missing(
                f"no such file or directory: {uri}" + (f" ({e})" if "bucket" in str(e).lower() else "")
            ) from None
        except Exception as e:
            if "Credentials" in type(e).__name__ or (isinstance(e, PermissionError) and not on_disk(files)):
                raise UserError(
                    f"no access to {uri}: {e} (are the credentials of this store set in the environment?)"
                ) from None
            if on_disk(files) or not _passing(e):
                raise
            if time.monotonic() + pause > ends:
                raise UserError(f"{uri}: the store has failed for {GIVE_UP_S:g} s: {type(e).__name__}: {e}") from e
            print(f"{uri}: {type(e).__name__}: {e}; trying again in {pause:g} s", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def _passing(e: Exception) -> bool:
    """Whether an error of a remote store may be gone at the next try."""
    if isinstance(e, OSError):
        return (
            not isinstance(e, PermissionError | FileExistsError | IsADirectoryError | NotADirectoryError)
            # which a repetition does not mend
            and e.errno not in (errno.EINVAL, errno.ENOSPC, errno.ENAMETOOLONG)
        )
    return isinstance(e, TimeoutError) or any(c.__name__ in PASSING for c in type(e).__mro__)
