"""Datasets of the Hub, read from a stub on loopback with the client's real requests."""

import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from ptf.config import loads
from ptf.data.order import Ordered
from ptf.data.sources import hub
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import fingerprint, rows_once
from ptf.errors import UserError
from ptf.run import begun_job, datasets_at_commits, resolved, write_job_file
from tests.child import run_python
from tests.data.hub_stub import HubStub, running
from tests.data.sources.test_files import numbers

README = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


def parquet(*numbers: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"n": numbers, "text": ["é" * n for n in numbers]}), sink, row_group_size=2)
    return sink.getvalue()


def gsm(first: int = 0) -> dict[str, bytes]:
    return {
        "README.md": README,
        ".gitattributes": b"",
        "main/train-00000-of-00002.parquet": parquet(first, 1, 2),
        "main/train-00001-of-00002.parquet": parquet(3, 4),
        "main/test-00000-of-00001.parquet": parquet(5),
        "socratic/train-00000-of-00001.parquet": parquet(6),
    }


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStub]:
    with running() as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
        # what is asked again without need fails the test at once
        monkeypatch.setattr("ptf.storage.store.GIVE_UP_S", 0.0)
        monkeypatch.chdir(tmp_path)
        hub._check_reachable.cache_clear()
        yield stub


def test_an_id_with_config_and_split_gives_its_rows(stub: HubStub) -> None:
    commit = stub.push("open/gsm", gsm())
    ways = [
        "open/gsm:main:train",
        "hf://datasets/open/gsm:main:train",
        "hf://datasets/open/gsm/main/*::train",
    ]
    ways += [f"open/gsm@{commit}:main:train", "open/gsm@main:main:train", "hf://datasets/open/gsm@main/main/train-*"]
    for way in ways:
        assert numbers(way) == [0, 1, 2, 3, 4], way
    assert numbers("open/gsm:socratic") == [6]
    reader = Reader("open/gsm:main:train")
    assert reader.commit == commit
    assert reader.not_read == (
        ".gitattributes",
        "README.md",
        "main/test-00000-of-00001.parquet",
        "socratic/train-00000-of-00001.parquet",
    )
    assert next(iter(rows_once(reader))).where == f"hf://datasets/open/gsm@{commit}/main/train-00000-of-00002.parquet:1"
    assert reader.counts() == [[(2, 2), (1, 1)], [(2, 2)]]


REFUSED = {
    "gated/revision": (403, "GatedRepo"),
    "gated-files/resolve": (401, "GatedRepo"),
    "closed/revision": (403, ""),
    "closed-files/resolve": (401, ""),
    "legal/tree": (451, ""),
}


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("open/gsm", "several configs: write .*:CONFIG, one of main, socratic"),
        ("open/gsm:main", "several splits: train .*; test "),
        ("open/gsm:main:dev", "no split 'dev'; it has: train, test"),
        ("hf://datasets/open/gsm/main/*:main:train", "names files: a config does not go with that, remove `main`"),
        ("open/gsm@v9", "no branch, tag or commit 'v9'"),
        ("open/other", "no file or directory open/other here, and no such dataset on the Hub that you may read"),
        ("open/gated", "the dataset open/gated is gated: accept its terms on the Hub, and set HF_TOKEN"),
        ("open/gated-files", "the dataset open/gated-files is gated: accept its terms on the Hub, and set HF_TOKEN"),
        ("open/closed", r"the Hub does not show the dataset open/closed \(403\): set HF_TOKEN to a token that may"),
        ("open/closed-files", r"the Hub does not show the dataset open/closed-files \(401\): set HF_TOKEN"),
        ("open/legal", "the Hub refuses: "),
        ("open/a--b", "the dataset open/a--b cannot be on the Hub: "),
        ("open/script", "loading script, which is not run: open/script@refs/convert/parquet"),
        ("hf://models/open/gsm", "is not understood: write hf://datasets/OWNER/NAME"),
        ("open/folders", "several configs: write .*:CONFIG, one of main, socratic"),
    ],
)
def test_what_is_not_there_or_not_clear_is_one_sentence(stub: HubStub, location: str, message: str) -> None:
    stub.push("open/gsm", gsm())
    for name, refused in REFUSED.items():
        stub.push(f"open/{name.partition('/')[0]}", gsm())
        stub.refused[f"datasets/open/{name}"] = refused
    stub.push("open/script", {"script.py": b"import os", "README.md": b"# none"})
    stub.push("open/folders", {name: data for name, data in gsm().items() if name != "README.md"})
    with pytest.raises(UserError, match=message):
        Reader(location)


def test_a_converted_script_dataset_has_folders_for_configs(stub: HubStub) -> None:
    stub.push(
        "open/script",
        {
            f"{c}/{s}/0000.parquet": parquet(n)
            for n, (c, s) in enumerate([("a", "train"), ("a", "test"), ("b", "train")])
        },
        "refs/convert/parquet",
    )
    assert numbers("open/script@refs/convert/parquet:a:train") == [0]


def test_a_directory_of_that_name_is_read_instead(stub: HubStub, tmp_path: Path) -> None:
    stub.push("open/gsm", {"train.jsonl": b'{"n": 1}\n'})
    assert numbers("open/gsm") == [1]
    (tmp_path / "open" / "gsm").mkdir(parents=True)
    (tmp_path / "open" / "gsm" / "train.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "open" / "gsm" / "test.jsonl").write_text('{"n": 3}\n')
    assert numbers("open/gsm::train") == [2]
    assert numbers("hf://datasets/open/gsm") == [1]


def test_what_was_read_is_kept_and_verified(stub: HubStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "PIECE", 100)
    text = b"".join(b'{"n": %d, "text": "%s"}\n' % (n, b"x" * 40) for n in range(200))
    commit = stub.push("open/lines", {"train.jsonl": text})
    assert numbers("open/lines") == list(range(200))
    ranges = [asked for path, asked in stub.asked if "/resolve/" in path]
    assert len(ranges) < 10  # neighbouring pieces are one request
    pinned = f"open/lines@{commit}"
    stub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # nothing is asked, for all of it is there
    hub._check_reachable.cache_clear()  # as in a process that begins without a network
    assert numbers(pinned) == list(range(200))
    assert stub.asked == []
    piece = next((tmp_path / "home").rglob("train.jsonl/000003"))
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        numbers(pinned)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert numbers(pinned) == list(range(200))  # a damaged piece is fetched again
    assert [asked for path, asked in stub.asked if "/resolve/" in path] == ["bytes=300-399"]


def test_a_hub_that_fails_now_and_then_is_asked_again(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptf.storage.store.GIVE_UP_S", 60.0)
    monkeypatch.setattr("ptf.storage.store.time.sleep", lambda s: None)
    stub.push("open/gsm", gsm())
    stub.fails = 3
    assert numbers("open/gsm:main:test") == [5]


def test_a_moved_branch_does_not_change_a_run(stub: HubStub, tmp_path: Path) -> None:
    old = stub.push("open/gsm", gsm())
    source = Ordered(Reader("open/gsm:main:train"), "k", 1, 0).partition(0)
    first = [next(source).read()["n"] for _ in range(2)]
    state = json.loads(json.dumps(source.state_dict()))
    new = stub.push("open/gsm", gsm(first=7))  # of the same names and sizes
    assert fingerprint(Reader("open/gsm:main:train")) != state["files"]
    with pytest.raises(
        UserError,
        match=f"is at commit {new}, the checkpoint's data were of commit {old}: write @{old} behind the dataset's name",
    ):
        Ordered(Reader("open/gsm:main:train"), "k", 1, 0).partition(0).load_state_dict(state)
    again = Ordered(Reader(f"open/gsm@{old}:main:train"), "k", 1, 0).partition(0)
    again.load_state_dict(state)
    assert first + [next(again).read()["n"] for _ in range(3)] == [0, 1, 2, 3, 4]


JOB = """recipe: sft
model: {path: m}
data: {sources: {a: {path: "open/gsm:main:train"}, b: {path: b.jsonl}},
       validation: {v: {path: "open/gsm@main:main:test"}}}
train: {steps: 1, lr: 1e-3}
output: OUT
"""


def test_a_job_is_resolved_to_commits_once_and_keeps_them(stub: HubStub, tmp_path: Path) -> None:
    job = loads(JOB.replace("OUT", str(tmp_path / "runs")))
    old = stub.push("open/gsm", gsm())
    begun = resolved(job)
    assert begun.data.sources["a"].path == f"hf://datasets/open/gsm@{old}:main:train"
    assert begun.data.validation["v"].path == f"hf://datasets/open/gsm@{old}:main:test"
    assert begun.data.sources["b"].path == "b.jsonl"
    write_job_file(begun, tmp_path / "runs" / "one")
    new = stub.push("open/gsm", gsm(first=7))
    train, test = "hf://datasets/open/gsm@{}:main:train".format, "hf://datasets/open/gsm@{}:main:test".format
    assert datasets_at_commits(job) == {"data.sources.a": train(new), "data.validation.v": test(new)}
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text("{}\n")  # it has begun
    # the second asks for a branch, which has moved
    assert datasets_at_commits(job, begun_job(tmp_path / "runs" / "one")) == {
        "data.sources.a": train(old),
        "data.validation.v": test(new),
    }
    with pytest.raises(UserError, match=rf'data\.validation\.v\.path: "{test(old)}" → "{test(new)}"'):
        write_job_file(resolved(job, run_name="one"), tmp_path / "runs" / "one")


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached (ConnectError)"),
    ],
)
def test_without_a_network_it_is_one_sentence_at_once(environment: dict[str, str], why: str, tmp_path: Path) -> None:
    """In a process of its own, for the client reads its environment once."""
    script = """
from ptf.data.sources.reader import Reader
from ptf.errors import UserError
try:
    Reader("open/gsm:main:train")
except UserError as error:
    print(error)
"""
    done = run_python("-c", script, timeout=120, env={**os.environ, "HF_HOME": str(tmp_path / "home"), **environment})
    (sentence,) = done.stdout.strip().splitlines()
    assert "there is no file or directory open/gsm here" in sentence
    assert (
        "run this once on a machine with a network, with HF_HOME on a disk that this machine can read, "
        "or give a directory" in sentence
    )
    assert why in sentence


def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ptf.storage.hub.ANSWER_S", 0.2)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=r"did not answer within 0\.2 s|cannot be reached \(ReadTimeout\)"):
            Reader("open/gsm:main:train")
