"""A Hub on loopback: the few requests by which commits, their files and ranges of bytes are asked for."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from tests import loopback
from tests.loopback import Loopback


class HubStub(Loopback):
    """`commits`: commit → files; `branches`: (id, branch) → commit. `asked`: every path and range, in order. `fails`:
    so many requests for bytes are answered with 503. `refused`: a part of a path → the status and the code of the
    answer."""

    def __init__(self) -> None:
        super().__init__(Answers)
        self.commits: dict[str, Mapping[str, bytes]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.asked: list[tuple[str, str]] = []
        self.fails = 0
        self.refused: dict[str, tuple[int, str]] = {}

    def push(self, id: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A new commit of a dataset."""
        commit = hashlib.sha1(repr((id, sorted(files.items()))).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[id, branch] = commit
        return commit

    def requests(self, part: str) -> int:
        return sum(part in path for path, _ in self.asked)


class Answers(loopback.Answers):
    server: HubStub  # type: ignore[assignment]

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append((path, self.headers.get("Range", "")))
        for part, (status, code) in hub.refused.items():
            if part in path:
                return self.answer(b"{}", status, {"X-Error-Code": code})
        if found := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            return self.about(found[1], found[2], found[3] or "main")
        found = re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/(\w{40})/(.+)", path)
        if found is None or found[3] not in hub.commits.get(found[2], {}):
            return self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
        if hub.fails:
            hub.fails -= 1
            return self.answer(b"busy", 503, {})
        data = hub.commits[found[2]][found[3]]
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if bounds is None:
            return self.answer(data, 200, {})
        start, end = int(bounds[1]), int(bounds[2]) + 1
        self.answer(data[start:end], 206, {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    do_HEAD = do_GET

    def about(self, id: str, what: str | None, revision: str) -> None:
        hub = self.server
        if not any(known == id for known, _ in hub.branches):
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        commit = hub.branches.get((id, revision), revision)
        if commit not in hub.commits:
            return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        if what == "tree":
            entries = [{"type": "directory", "path": "data", "oid": "0" * 40, "size": 0}]
            entries += [
                {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
                for name, data in hub.commits[commit].items()
            ]
            return self.answer(entries, headers={"Content-Type": "application/json"})
        body = {
            "id": id,
            "sha": commit,
            "private": False,
            "gated": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [],
        }
        self.answer(body, headers={"Content-Type": "application/json"})


@contextmanager
def running() -> Iterator[HubStub]:
    with loopback.running(HubStub()) as hub:
        yield hub
