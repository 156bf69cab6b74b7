"""Datasets of the Hugging Face Hub: an id to a commit, a commit to its files, and files read by ranges of bytes that are kept on disk.

The one idea: a commit never changes, so a branch is turned into a commit once, and everything below a commit (its list of files, and every piece
that was read) is kept in `HF_HOME/ptf-datasets` and needs no network a second time. A piece is kept with its SHA-256 and verified when it is read
again. Nothing of a repository is executed: only data files are read.
"""

import functools
import hashlib
import io
import os
import posixpath
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from ptf import storage
from ptf.errors import UserError

T = TypeVar("T")
PREFIX = "hf://datasets/"
PIECE = 1 << 20  # bytes of a file that are kept together
ANSWER_S = 4.0  # for the first answer; the Hub is then known to be there
COMMIT = re.compile(r"[0-9a-f]{40}")
NAMES = r"(?::(?P<config>[^:/]*))?(?::(?P<split>[^:/]+))?"  # id:config:split
SHORT = re.compile(rf"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+?){NAMES}")
LONG = re.compile(rf"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>refs/\w+/\w+|[^/:@]+))?(?:{NAMES}|/(?P<inside>.+))")


@dataclass(frozen=True, slots=True)
class Repo:
    """A dataset of the Hub, or some files of it."""

    id: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None  # branch, tag or commit; the main branch where there is none
    inside: str | None = None  # glob of some of its files

    def __str__(self) -> str:
        return f"{PREFIX}{self.id}" + (f"/{self.inside}" if self.inside else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a commit."""

    size: int
    oid: str  # git's, or the SHA-256 of a large file


def parsed(path: str, config: str | None, split: str | None, revision: str | None) -> Repo | None:
    """The dataset that a path names: `owner/name`, `owner/name:config:split` or `hf://datasets/…`. None for any other path, and for one that is
    there on this machine. Raises UserError where the path and the keys contradict each other."""
    if path.startswith("hf://"):
        found = LONG.fullmatch(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
        if found is None:
            raise UserError(f"{path} is not understood: write hf://datasets/OWNER/NAME, hf://datasets/OWNER/NAME@REVISION or …/NAME/some/*.parquet")
    else:
        found = SHORT.fullmatch(path)
        local = found and (os.path.exists(path) or os.path.exists(found["id"]))
        if found is None or local or path.endswith((".jsonl", ".gz", ".zst", ".json", ".csv", ".parquet", ".arrow", ".feather")):
            return None
    said = found.groupdict()
    given = {"config": config, "split": split, "revision": revision}
    for key, value in given.items():
        if value and said.get(key) and said[key] != value:
            raise UserError(f"{path} says {key} {said[key]}, and the key `{key}` says {value}: give one of them")
    if said.get("inside") and config:
        raise UserError(f"{path} names files: `config` does not go with that, remove it")
    merged = {key: said.get(key) or value for key, value in given.items()}
    return Repo(said["id"], merged["config"], merged["split"], merged["revision"], said.get("inside"))


def without_names(path: str, config: str | None, split: str | None) -> tuple[str, str | None, str | None]:
    """A local `directory:config:split` taken apart, as ids of the Hub are."""
    found = SHORT.fullmatch(path)
    if found is None or os.path.exists(path) or not os.path.exists(found["id"]):
        return path, config, split
    return found["id"], found["config"] or config, found["split"] or split


def uri(id: str, commit: str, name: str) -> str:
    return f"{PREFIX}{id}@{commit}/{name}"


def commit_of(id: str, revision: str | None) -> str:
    """The commit that a branch or tag is at now. Raises UserError where the Hub cannot be asked, within five seconds, or does not have it."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    return _info(id, revision)


def tree(id: str, commit: str) -> dict[str, Entry]:
    """The files of a commit, sorted by name."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    kept = _kept(id, commit) / "files.json"
    if kept.is_file():
        try:
            said = storage.record(str(kept), "", {"id": id, "commit": commit})["files"]
            return {name: Entry(size, oid) for name, (size, oid) in said.items()}
        except storage.Corrupt:
            kept.unlink()  # it is asked for again
    _reached(id, commit)
    listed = lambda: list(HfApi(endpoint=constants.ENDPOINT).list_repo_tree(id, repo_type="dataset", revision=commit, recursive=True))  # noqa: E731
    files = [file for file in _patiently(f"{PREFIX}{id}", listed) if isinstance(file, RepoFile)]
    found = {file.path: Entry(file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in sorted(files, key=lambda file: file.path)}
    listed_files = {name: [entry.size, entry.oid] for name, entry in found.items()}
    _write(kept, storage.record_text({"id": id, "commit": commit, "files": listed_files}).encode())
    return found


def read_text(id: str, commit: str, name: str) -> str:
    """A small file of a commit."""
    with open_read(uri(id, commit, name)) as file:
        return file.read().decode()


def open_read(uri: str, read_bytes: int = PIECE) -> IO[bytes]:
    """A file of a commit (`hf://datasets/ID@COMMIT/NAME`), to read and to seek in; what is read is kept on disk."""
    found = LONG.fullmatch(uri.removeprefix(PREFIX))
    assert found is not None, uri
    assert COMMIT.fullmatch(found["revision"] or ""), uri
    entry = tree(found["id"], found["revision"]).get(found["inside"])
    if entry is None:
        raise storage.Missing(f"no such file: {uri}")
    return io.BufferedReader(_Pieces(found["id"], found["revision"], found["inside"], entry.size), max(read_bytes, PIECE))


def _info(id: str, revision: str | None) -> str:
    """The commit of a revision, as the Hub says now. Raises UserError in one sentence, within five seconds, where it cannot be had."""
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.is_offline_mode():
        raise UserError(_away(id, revision, "the Hub may not be asked (HF_HUB_OFFLINE)"))
    ask = functools.partial(HfApi(endpoint=constants.ENDPOINT).dataset_info, id, revision=revision, timeout=ANSWER_S)
    try:
        return str(_within(ANSWER_S, ask).sha)
    except RevisionNotFoundError:
        raise UserError(f"{PREFIX}{id} has no branch, tag or commit {revision!r}: correct `revision`") from None
    except GatedRepoError:
        raise UserError(f"{PREFIX}{id} is gated: accept its terms on the Hub, and set HF_TOKEN to a token of that account") from None
    except RepositoryNotFoundError:
        raise UserError(f"there is no file or directory {id} here, and no such dataset on the Hub that you may read (private: set HF_TOKEN)") from None
    except NotInTime:
        raise UserError(_away(id, revision, f"the Hub ({constants.ENDPOINT}) did not answer within {ANSWER_S:g} s")) from None
    except (httpx.HTTPError, HfHubHTTPError, OSError) as error:
        raise UserError(_away(id, revision, f"the Hub ({constants.ENDPOINT}) cannot be reached ({type(error).__name__})")) from None


@functools.lru_cache(maxsize=64)
def _reached(id: str, commit: str) -> None:
    """Once a process and commit: a machine without a network says so at once, before requests are repeated."""
    _info(id, commit)


def _away(id: str, revision: str | None, why: str) -> str:
    kept = _kept(id, "").parent
    commits = sorted((file.parent.name for file in kept.glob("*/files.json")), key=lambda name: (kept / name).stat().st_mtime)
    commits = [commit for commit in commits if commit != revision]
    known = f", set `revision: {commits[-1]}`, a commit of which it holds what was read before" if commits else ""
    return (
        f"there is no file or directory {id} here, {why}, and {kept} does not hold what is asked for: run this once where there is a network,"
        f" with HF_HOME on a disk that this machine sees{known}, or give a directory"
    )


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` gives, which may hang in the resolver where no timeout counts. Raises concurrent.futures.TimeoutError."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # it belongs to who waits
            answer.set_exception(error)

    threading.Thread(target=work, name="ptf-hub", daemon=True).start()
    return answer.result(seconds)


def _patiently(what: str, ask: Callable[[], T]) -> T:
    """As requests to an object store are repeated; what will not change is an error at once."""
    from huggingface_hub.errors import HfHubHTTPError

    def once() -> T:
        try:
            return ask()
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if 400 <= status < 500 and status not in (408, 429):
                raise UserError(f"{what}: the Hub refuses: {next(iter(str(error).strip().splitlines()), status)}") from None
            raise

    return storage.patiently(what, once)


def _kept(id: str, commit: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "ptf-datasets" / id.replace("/", "--") / (commit or "-")


def _write(file: Path, data: bytes) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        os.replace(part, file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"what is read from the Hub cannot be kept in {file.parent}: {error}; set HF_HOME to a directory with room") from None


class _Pieces(storage.Ranged):
    """A file of a commit. Pieces that were read before come from disk; neighbours that were not are one request."""

    def __init__(self, id: str, commit: str, name: str, size: int) -> None:
        super().__init__(size)
        self._id, self._commit, self._name = id, commit, name
        self._folder = _kept(id, commit) / "pieces" / name

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        first, last = self._at // PIECE, (end - 1) // PIECE
        pieces = {number: self._held(number) for number in range(first, last + 1)}
        missing = [number for number, piece in pieces.items() if piece is None]
        while missing:
            run = [number for i, number in enumerate(missing) if number == missing[0] + i]
            pieces.update(self._fetched(run[0], run[-1]))
            missing = missing[len(run) :]
        whole = b"".join(pieces[number] or b"" for number in range(first, last + 1))
        buffer[: end - self._at] = whole[self._at - first * PIECE : end - first * PIECE]
        count, self._at = end - self._at, end
        return count

    def _held(self, number: int) -> bytes | None:
        try:
            held = (self._folder / f"{number:06}").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        data = held[32:]
        return data if self._digest(number, data) == held[:32] else None  # damaged, or another's: it is fetched again

    def _digest(self, number: int, data: bytes) -> bytes:
        """Of a piece and of where it belongs."""
        return hashlib.sha256(f"{self._id}@{self._commit}/{self._name} {number}\n".encode() + data).digest()

    def _fetched(self, first: int, last: int) -> Mapping[int, bytes]:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        if constants.is_offline_mode():
            raise UserError(_away(self._id, self._commit, f"the Hub may not be asked (HF_HUB_OFFLINE) for {posixpath.basename(self._name)}"))
        _reached(self._id, self._commit)
        start, end = first * PIECE, min((last + 1) * PIECE, self._size)
        url = hf_hub_url(self._id, self._name, repo_type="dataset", revision=self._commit, endpoint=constants.ENDPOINT)

        def get() -> bytes:
            answer = get_session().get(url, headers={**build_hf_headers(), "range": f"bytes={start}-{end - 1}"}, timeout=60.0, follow_redirects=True)
            hf_raise_for_status(answer)
            data = answer.content[start:end] if answer.status_code == 200 and len(answer.content) == self._size else answer.content
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes came instead of {end - start}")
            return data

        data = _patiently(uri(self._id, self._commit, self._name), get)
        pieces = {number: data[i * PIECE : (i + 1) * PIECE] for i, number in enumerate(range(first, last + 1))}
        for number, piece in pieces.items():
            _write(self._folder / f"{number:06}", self._digest(number, piece) + piece)
        return pieces
