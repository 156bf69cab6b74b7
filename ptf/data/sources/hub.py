"""Datasets of the Hugging Face Hub: an id becomes a commit, a commit becomes files, and files are read by byte ranges.

A commit never changes, so a branch is resolved to a commit once. Everything below a commit (its list of files, and
every piece that was read) is cached in `HF_HOME/ptf-datasets` and needs no network a second time. A piece is cached
with its SHA-256 and verified when it is read again. Nothing of a repository is executed: only data files are read.
"""

import contextlib
import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from ptf import storage
from ptf.errors import UserError
from ptf.storage.hub import Unreachable, commit_at, refusal
from ptf.workspace import scratch

T = TypeVar("T")
PREFIX = "hf://datasets/"
PIECE = 1 << 20  # bytes of a file that are cached together
COMMIT = re.compile(r"[0-9a-f]{40}")
NAMED = re.compile(r"(?P<path>.+?):(?P<config>[^:/]*)(?::(?P<split>[^:/]+))?")
FILES = (".jsonl", ".gz", ".zst", ".json", ".csv", ".parquet", ".arrow", ".feather")
SHORT_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[^:@]+))?")
HUB_URI = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>refs/\w+/\w+|[^/:@]+))?(?:/(?P<inside>.+))?")


@dataclass(frozen=True, slots=True)
class Repo:
    """A dataset of the Hub, or some files of it."""

    id: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None  # branch, tag or commit; None: the main branch
    inside: str | None = None  # glob of some of its files

    def __str__(self) -> str:
        return f"{PREFIX}{self.id}" + (f"/{self.inside}" if self.inside else "")

    def at(self, commit: str) -> str:
        """Return the path of the same files at a commit."""
        chosen = f":{self.config or ''}" if self.config or self.split else ""
        return f"{replace(self, id=f'{self.id}@{commit}')}{chosen}" + (f":{self.split}" if self.split else "")


class Entry(NamedTuple):
    """A file of a commit."""

    size: int
    oid: str  # git's object id, or the SHA-256 of a large file


def parse_location(path: str) -> Repo | None:
    """Return the dataset that a path names: `owner/name` or `hf://datasets/…`, with or without `@revision` and
    `:config:split`. The result is None for any other path, and for one that exists on this machine."""
    place, config, split = without_names(path)
    if place.startswith("hf://"):
        found = HUB_URI.fullmatch(place.removeprefix(PREFIX)) if place.startswith(PREFIX) else None
        if found is None:
            raise UserError(
                f"{path} is not understood: write hf://datasets/OWNER/NAME, "
                "hf://datasets/OWNER/NAME@REVISION or …/NAME/some/*.parquet"
            )
    else:
        found = SHORT_ID.fullmatch(place)
        if found is None or os.path.exists(place) or place.endswith(FILES):
            return None
    in_path = found.groupdict()
    if in_path.get("inside") and config:
        raise UserError(f"{path} names files: a config does not go with that, remove `{config}`")
    return Repo(in_path["id"], config, split, in_path["revision"], in_path.get("inside"))


def without_names(path: str) -> tuple[str, str | None, str | None]:
    """Return the place, the config and the split of `PATH`, `PATH:CONFIG`, `PATH:CONFIG:SPLIT` or `PATH::SPLIT`.

    A path that exists on this machine, that ends with the suffix of a file, or with /, has no names at its end.
    """
    found = NAMED.fullmatch(path)
    if found is None or path.endswith(FILES) or os.path.exists(path.removeprefix("file://")):
        return path, None, None
    return found["path"], found["config"] or None, found["split"]


def uri(id: str, commit: str, name: str) -> str:
    """Return the URI of a file of a commit."""
    return f"{PREFIX}{id}@{commit}/{name}"


def commit_of(id: str, revision: str | None) -> str:
    """Return the current commit of a branch or tag.

    Raises UserError where the Hub does not answer within five seconds, or does not have the revision.
    """
    return revision if revision and COMMIT.fullmatch(revision) else _resolve(id, revision)


def tree(id: str, commit: str) -> dict[str, Entry]:
    """Return the files of a commit, sorted by name."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    cached = _cache_directory(id, commit) / "files.json"
    with contextlib.suppress(storage.Corrupt, NotADirectoryError):  # missing or damaged: it is requested
        listing = storage.read_record(str(cached), "", {"id": id, "commit": commit})["files"]
        return {name: Entry(*entry) for name, entry in listing.items()}
    _check_reachable(id, commit)

    def listed():
        return list(
            HfApi(endpoint=constants.ENDPOINT).list_repo_tree(id, repo_type="dataset", revision=commit, recursive=True)
        )

    files = [file for file in _with_retries(f"{PREFIX}{id}", id, commit, listed) if isinstance(file, RepoFile)]
    entries = {
        file.path: Entry(file.size, file.lfs.sha256 if file.lfs else file.blob_id)
        for file in sorted(files, key=lambda file: file.path)
    }
    _write(cached, storage.record_text({"id": id, "commit": commit, "files": entries}).encode())
    return entries


def open_read(uri: str, read_bytes: int = PIECE) -> IO[bytes]:
    """Open a file of a commit (`hf://datasets/ID@COMMIT/NAME`) to read and to seek in; pieces read are cached."""
    found = HUB_URI.fullmatch(uri.removeprefix(PREFIX))
    assert found is not None, uri
    assert COMMIT.fullmatch(found["revision"] or ""), uri
    entry = tree(found["id"], found["revision"]).get(found["inside"])
    if entry is None:
        raise storage.Missing(f"no such file: {uri}")
    return io.BufferedReader(
        _Pieces(found["id"], found["revision"], found["inside"], entry.size), max(read_bytes, PIECE)
    )


def _resolve(id: str, revision: str | None) -> str:
    """Return the commit that a revision is at now.

    Raises UserError of one sentence, within five seconds, where the Hub cannot answer.
    """
    try:
        return commit_at("dataset", id, revision)
    except Unreachable as error:
        raise UserError(_unavailable(id, revision, str(error))) from None


# once per process and commit, before requests are retried
_check_reachable = functools.lru_cache(maxsize=64)(_resolve)


def _unavailable(id: str, revision: str | None, why: str) -> str:
    """Return the message for files that are neither on this machine nor available from the Hub."""
    cache = _cache_directory(id, "").parent
    folders = sorted((file.parent for file in cache.glob("*/files.json")), key=lambda folder: folder.stat().st_mtime)
    commits = [folder.name for folder in folders if folder.name != revision]
    known = f", read {id}@{commits[-1]}, a commit that is cached there" if commits else ""
    return (
        f"there is no file or directory {id} here, {why}, and {cache} does not hold the files: "
        "run this once on a machine with a network,"
        f" with HF_HOME on a disk that this machine can read{known}, or give a directory"
    )


def _with_retries(what: str, id: str, commit: str, request: Callable[[], T]) -> T:
    """Repeat a request like requests to an object store; an error that will not change is raised at once."""

    def once() -> T:
        try:
            return request()
        except Exception as error:
            if why := refusal(error, "dataset", id, commit):
                raise UserError(f"{what}: {why}") from None
            raise

    return storage.retry(None, what, once)


def _cache_directory(id: str, commit: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "ptf-datasets" / id.replace("/", "--") / (commit or "-")


def _write(file: Path, data: bytes) -> None:
    try:
        with scratch.file(file) as part:
            part.write_bytes(data)
            os.replace(part, file)
    except OSError as error:
        raise UserError(
            f"files of the Hub cannot be cached in {file.parent}: {error}; set HF_HOME to a directory with room"
        ) from None


class _Pieces(storage.Ranged):
    """A file of a commit. Cached pieces come from disk; neighbours that are not cached are one request."""

    def __init__(self, id: str, commit: str, name: str, size: int) -> None:
        super().__init__(size)
        self._id, self._commit, self._name = id, commit, name
        self._folder = _cache_directory(id, commit) / "pieces" / name

    def _range(self, start: int, end: int) -> bytes:
        first, last = start // PIECE, (end - 1) // PIECE
        pieces = {number: self._cached(number) for number in range(first, last + 1)}
        missing = [number for number, piece in pieces.items() if piece is None]
        while missing:
            run = [number for i, number in enumerate(missing) if number == missing[0] + i]
            pieces.update(self._fetch(run[0], run[-1]))
            missing = missing[len(run) :]
        whole = b"".join(pieces[number] or b"" for number in range(first, last + 1))
        return whole[start - first * PIECE : end - first * PIECE]

    def _cached(self, number: int) -> bytes | None:
        """Return a piece from the cache; None where it is missing or damaged."""
        try:
            stored = (self._folder / f"{number:06}").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        data = stored[32:]
        # A piece that is damaged, or of another file, is fetched again.
        return data if self._digest(number, data) == stored[:32] else None

    def _digest(self, number: int, data: bytes) -> bytes:
        """Return the digest of a piece and of where it belongs."""
        return hashlib.sha256(f"{self._id}@{self._commit}/{self._name} {number}\n".encode() + data).digest()

    def _fetch(self, first: int, last: int) -> Mapping[int, bytes]:
        """Download the pieces `first` to `last` in one request and cache them."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        _check_reachable(self._id, self._commit)
        start, end = first * PIECE, min((last + 1) * PIECE, self._size)
        url = hf_hub_url(self._id, self._name, repo_type="dataset", revision=self._commit, endpoint=constants.ENDPOINT)

        def get() -> bytes:
            answer = get_session().get(
                url,
                headers={**build_hf_headers(), "range": f"bytes={start}-{end - 1}"},
                timeout=60.0,
                follow_redirects=True,
            )
            hf_raise_for_status(answer)
            data = (
                answer.content[start:end]
                if answer.status_code == 200 and len(answer.content) == self._size
                else answer.content
            )
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes arrived instead of {end - start}")
            return data

        data = _with_retries(uri(self._id, self._commit, self._name), self._id, self._commit, get)
        pieces = {number: data[i * PIECE : (i + 1) * PIECE] for i, number in enumerate(range(first, last + 1))}
        for number, piece in pieces.items():
            _write(self._folder / f"{number:06}", self._digest(number, piece) + piece)
        return pieces
