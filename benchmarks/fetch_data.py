"""The public data that tests and benchmarks read, fetched by checksum into a directory for PTF_DATA: `make data`.

    python benchmarks/fetch_data.py [--into DIRECTORY] [--manifest benchmarks/public_data.yaml]

The manifest names every file with its source, SHA-256 and licence. Most are copies; a few are remade from their sources
by the functions here. A file appears under its name only when it is whole and its checksum is right; what broke off is
continued by the next run; what is there already is kept.
"""

import gzip
import hashlib
import http.client
import itertools
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commands import ROOT, options

TIMEOUT_S = 30.0
READ = 1 << 20
# of the 100 of OpenAssistant, by their place
TREES_LEFT_OUT = (0, 2, 3, 5, 6, 8, 13, 14, 24, 26, 32, 43, 44, 45, 74, 84, 86, 90, 97, 98)


class Unreachable(Exception):
    """No answer from a host."""


class Wrong(Exception):
    """What came is not what the manifest names."""


def main() -> int:
    into = Path(os.environ.get("PTF_DATA") or ROOT / "data"), "default: PTF_DATA, else data/ here"
    given = options(__doc__, into=into, manifest=ROOT / "benchmarks" / "public_data.yaml")
    manifest = yaml.safe_load(given.manifest.read_text())
    into = given.into.resolve()
    failed = list(fetch_all(manifest, into))
    for line in failed:
        print(line, file=sys.stderr)
    for entry in manifest.get("not_remade", []):
        if not (into / entry["path"]).exists():
            print(f"not remade: {entry['path']} ({entry['licence']}; {entry['from']}): tests that read it are skipped")
    if failed:
        print(f"{len(failed)} files are missing in {into}; run this again to go on", file=sys.stderr)
        return 1
    print(f"all files are in {into}: export PTF_DATA={into}")
    return 0


def fetch_all(manifest: Mapping[str, Any], into: Path) -> Iterator[str]:
    """Fetch and remake what is not there; one line for each file that could not be had.
    Where a host does not answer, it is not asked again."""
    away: set[str] = set()
    for entry in (*manifest.get("files", []), *manifest.get("derived", []), *manifest.get("written", [])):
        path, host = into / entry["path"], urllib.request.Request(entry["url"]).host if "url" in entry else ""
        if path.exists() and content_sha256(path, entry) == entry["sha256"]:
            continue
        if host in away:
            yield f"{entry['path']}: {host} did not answer"
            continue
        try:
            make(entry, into)
            print(f"{entry['path']}: done", flush=True)
        except Unreachable as error:
            away.add(host)
            yield f"{entry['path']}: {host} did not answer ({error}): is there a network?"
        except Wrong as error:
            yield f"{entry['path']}: {error}"


def make(entry: Mapping[str, Any], into: Path) -> None:
    """One file of the manifest. Raises Unreachable or Wrong, leaving nothing under its name."""
    path = into / entry["path"]
    if "text" in entry:
        data = entry["text"].encode()
    elif "by" in entry:
        source = into / ".sources" / hashlib.sha256(entry["url"].encode()).hexdigest()[:16]
        if not source.exists():
            download(entry["url"], source, entry.get("source_sha256"))
        try:
            data = DERIVED[entry["by"]](source.read_bytes())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            source.unlink()
            raise Wrong(
                f"{entry['url']} is not of the form that {entry['by']} reads: {type(error).__name__}: {error}"
            ) from None
    else:
        download(entry["url"], path, entry["sha256"])
        return
    if (found := hashlib.sha256(data).hexdigest()) != entry["sha256"]:
        raise Wrong(f"what was made has SHA-256 {found}, the manifest says {entry['sha256']}")
    part = part_of(path)
    part.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    os.replace(part, path)


def download(url: str, path: Path, sha256: str | None) -> None:
    """A whole file. What an earlier run left of it is continued where the server can, else begun anew."""
    part = part_of(path)
    held = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        url, headers={"User-Agent": "ptf-fetch-data", **({"Range": f"bytes={held}-"} if held else {})}
    )
    try:
        with (
            urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer,
            part.open("ab" if answer.status == 206 else "wb") as file,
        ):
            expected = int(answer.headers.get("Content-Length") or 0)
            begun = file.tell()
            while data := answer.read(READ):
                file.write(data)
            if expected and file.tell() - begun < expected:
                raise Wrong(f"{url} broke off after {file.tell():,} bytes; run this again to go on")
    except urllib.error.HTTPError as error:
        if error.code == 416:  # what is held is not a beginning of it
            part.unlink(missing_ok=True)
        raise Wrong(f"{url} answers {error.code} {error.reason}") from None
    except http.client.IncompleteRead:
        raise Wrong(f"{url} broke off after {part.stat().st_size:,} bytes; run this again to go on") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise Unreachable(str(getattr(error, "reason", error))) from None
    found = hashlib.sha256(part.read_bytes()).hexdigest()
    if sha256 is not None and found != sha256:
        part.unlink()
        raise Wrong(f"{url} has SHA-256 {found}, the manifest says {sha256}: it was changed upstream, or on the way")
    os.replace(part, path)


def part_of(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def content_sha256(path: Path, entry: Mapping[str, Any]) -> str:
    """Of a copy, the file's; of what was remade, of what it holds, for compressors differ."""
    data = path.read_bytes()
    try:
        return hashlib.sha256(gzip.decompress(data) if "by" in entry and path.suffix == ".gz" else data).hexdigest()
    except (OSError, EOFError):
        return ""


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def first_819_lines(source: bytes) -> bytes:
    return b"".join(source.splitlines(keepends=True)[:819])


def chat_template(source: bytes) -> bytes:
    """Of a tokenizer_config.json."""
    return json.loads(source)["chat_template"].encode()


def tau_airline(source: bytes) -> bytes:
    """The first three trials of each of the 50 tasks."""
    ids = "tau-airline-{task_id}-{trial}"
    trials = json.loads(source)[:150]
    return lines([{"id": ids.format(**t), "reward": t["reward"], "messages": t["traj"]} for t in trials])


def oasst_trees(source: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for i, line in enumerate(source.splitlines()) if i not in TREES_LEFT_OUT]


def oasst_paths(source: bytes) -> bytes:
    """Every way from a prompt to a leaf, up to its last answer, once; with the leaf's id."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def walk(tree: str, message: dict[str, Any], before: list[dict[str, Any]]) -> None:
        way = [*before, message]
        replies = message.get("replies") or []
        if not replies:
            answered = way if message["role"] == "assistant" else before
            said = [
                {"role": "user" if m["role"] == "prompter" else "assistant", "content": m["text"]} for m in answered
            ]
            row = {
                "id": message["message_id"],
                "tree_id": tree,
                "lang": message["lang"],
                "messages": said,
                "source": "LAION-AI/Open-Assistant",
            }
            if answered:
                found.setdefault(tuple(m["message_id"] for m in answered), row)
        for reply in replies:
            walk(tree, reply, way)

    for tree in oasst_trees(source):
        walk(tree["message_tree_id"], tree["prompt"], [])
    return lines(list(found.values()))


def oasst_pairs(source: bytes) -> bytes:
    """Every two ranked answers to the same message, the better one chosen."""
    rows: list[dict[str, Any]] = []

    def walk(tree: str, message: dict[str, Any], before: list[dict[str, Any]]) -> None:
        said = [*before, {"role": "user" if message["role"] == "prompter" else "assistant", "content": message["text"]}]
        replies = message.get("replies") or []
        ranked = [r for r in replies if r.get("rank") is not None and message["role"] == "prompter"]
        for better, worse in itertools.combinations(sorted(ranked, key=lambda r: r["rank"]), 2):
            pair = {"tree_id": tree, "prompt": said, "chosen": better["text"], "rejected": worse["text"]}
            ranks = {"rank_chosen": better["rank"], "rank_rejected": worse["rank"]}
            rows.append({**pair, "lang": message["lang"], **ranks, "source": "LAION-AI/Open-Assistant"})
        for reply in replies:
            walk(tree, reply, said)

    for tree in oasst_trees(source):
        walk(tree["message_tree_id"], tree["prompt"], [])
    return lines(rows)


DERIVED: dict[str, Callable[[bytes], bytes]] = {
    made.__name__: made for made in (first_819_lines, chat_template, tau_airline, oasst_paths, oasst_pairs)
}

if __name__ == "__main__":
    sys.exit(main())
