"""Sources in an object store, through s3fs and a server on loopback."""

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs

from ptf import storage
from ptf.data.order import Ordered
from ptf.data.sources import reader
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import rows_once
from ptf.errors import UserError
from ptf.storage import file_verification
from ptf.storage.store import GIVE_UP_S
from tests.data.sources.test_rows import take, write

moto_server = pytest.importorskip("moto.server", reason="needs moto, which requirements/gpu.txt leaves out")


class Server:
    """An S3 server whose objects outlive its being stopped."""

    def __init__(self) -> None:
        self.port, self.bucket = 0, f"rows-{uuid.uuid4().hex}"
        self.start()

    def start(self) -> None:
        self._server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))  # no credentials from there
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    server = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    s3fs.S3FileSystem().mkdir(server.bucket)
    yield server
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def put(server: Server, tmp_path: Path, suffix: str, rows: int = 90, files: int = 3) -> str:
    for f in range(files):
        made = write(
            tmp_path / f"part{f}.{suffix}",
            [{"n": n, "text": "x" * 2000} for n in range(f * rows // files, (f + 1) * rows // files)],
        )
        s3fs.S3FileSystem().put_file(str(made), f"{server.bucket}/data/{made.name}")
    return f"s3://{server.bucket}/data"


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_rows_stream_and_resume(server: Server, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LINES_BYTES", 10_000)
    uri = put(server, tmp_path, suffix)
    assert [place.read()["n"] for place in rows_once(Reader(f"{uri}/*"))] == list(range(90))
    source = Ordered(Reader(uri), "k", 2, 0).partition(1)
    found = take(source, 25)
    again = Ordered(Reader(uri), "k", 2, 0).partition(1)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert found + take(again, 20) == list(range(1, 90, 2))


def test_rows_stream_through_an_outage(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reader, "LINES_BYTES", 10_000)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # so that it is our own asking again that is seen
    uri = put(server, tmp_path, "jsonl")
    source = Ordered(Reader(uri), "k", 1, 0).partition(0)
    found = take(source, 10)
    server.stop()
    back = threading.Timer(2.0, server.start)
    back.start()
    found += take(source, 80)
    back.join()
    assert found == list(range(90))
    assert "trying again in 1 s" in capfd.readouterr().err


def test_what_is_not_there_is_named(server: Server) -> None:
    with pytest.raises(UserError, match=r"there is no bucket 'nosuch': s3://nosuch/a.jsonl"):
        Reader("s3://nosuch/a.jsonl")
    with pytest.raises(UserError, match=r"no such file or directory, and no file matches: s3://rows-.*/none\.jsonl"):
        Reader(f"s3://{server.bucket}/none.jsonl")


def test_missing_credentials_are_named_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"no access to s3://rows-.*/a\.jsonl: .*credentials"):
        Reader(f"s3://{server.bucket}/a.jsonl")
    assert time.monotonic() - began < GIVE_UP_S / 10  # it is not asked again


def test_a_published_directory_goes_up_and_comes_back(server: Server, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    (made / "sub" / "weights.bin").write_bytes(bytes(range(256)) * 100)
    storage.commit(made, {"step": 1})
    uri = f"s3://{server.bucket}/published/v1"
    storage.upload(made, uri)
    assert file_verification.verify(uri)["step"] == 1
    assert file_verification.verify(storage.localize(uri, tmp_path / "copies"))["step"] == 1
