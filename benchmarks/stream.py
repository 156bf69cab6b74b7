"""Streaming from a real S3 server: 2 GB of parquet through encode, shuffle, pack and loader, while the server goes away
for 20 s and the reader is killed.

    python benchmarks/stream.py [--gib 2] [--server ../shared/tools/rgw.sh]

`--server SCRIPT` is called as `SCRIPT start DIRECTORY PORT ACCESS_KEY SECRET_KEY` and `SCRIPT stop DIRECTORY`, and
leaves a `radosgw` process that is stopped and started again in the middle (Ceph's RADOS gateway; Debian packages
radosgw, ceph-mon, ceph-osd, ceph-common). Every row has a number; the reader writes down those that each step trained,
and its state every 20 steps. At about a third of the rows the server is ended for 20 s; at about two thirds the reader
is killed (SIGKILL) and continued from its last state. Asserts that every number was trained exactly once and that the
reader's memory grew by less than 500 MB; prints one JSON line and writes results/stream.md.
"""

import argparse
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flow_runs import ROOT, cpu

RESULTS = ROOT / "benchmarks" / "results" / "stream.md"
PORT, KEY, SECRET, BUCKET = 5907, "ptfkey", "ptfsecret", "rows"
ROW_BYTES, GROUP, FILE_ROWS = 4000, 1000, 25_000
PARTITIONS, SEQUENCES, SEQ_LEN, BASE = 8, 32, 4096, 1000
EVERY = 20  # steps between states
BOUND_MB = 500


def resident_mb() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def read(directory: Path) -> None:
    """The reader: consumes the bucket once, from its last state where there is one."""
    from ptf.data.loader import Loader
    from ptf.data.partitions import Partitions
    from ptf.data.sample import PackUnit, Sample
    from ptf.data.sources.rows import SourceSpec

    def encode(row: dict[str, Any], source: str) -> list[PackUnit]:
        """The bytes of the text as ids, behind the row's number: as quick as a tokenizer can be,
        so that the stream is what is measured."""
        n = row["n"]
        body = np.frombuffer(row["text"].encode(), np.uint8)[: 100 + n % 900].astype(np.int32)
        tokens = np.concatenate([np.array([n // BASE, n % BASE], np.int32), body])
        return [(Sample(tokens, np.ones(len(tokens), np.float32), source),)]

    import torch  # noqa: F401  # what a trainer has loaded anyway

    base = resident_mb()
    sources = {"s3": SourceSpec(f"s3://{BUCKET}/*.parquet", epochs=1)}
    partitions = Partitions(
        sources, None, encode, partitions=PARTITIONS, seed=0, shuffle=256, seq_len=SEQ_LEN, lookahead=64
    )
    loader = Loader(
        partitions, partitions=PARTITIONS, sequences=SEQUENCES, micro_batch_sequences=SEQUENCES, seq_len=SEQ_LEN
    )
    state = directory / "state.pkl"
    if state.exists():
        loader.load_state_dict(pickle.loads(state.read_bytes()))
    with (directory / "ledger.jsonl").open("a") as ledger:
        while True:
            (batch,) = next(loader)
            first = np.cumsum([0, *batch.lengths])[:-1][np.array(batch.lengths) > 1]
            flat = batch.tokens[batch.segments >= 0].numpy()
            numbers = (flat[first] * BASE + flat[first + 1]).tolist()
            if not numbers:
                break
            ledger.write(json.dumps({"step": loader.step, "numbers": numbers, "added_mb": resident_mb() - base}) + "\n")
            ledger.flush()
            if loader.step % EVERY == 0:
                part = directory / "state.part"
                part.write_bytes(pickle.dumps(loader.state_dict()))
                os.replace(part, state)
    loader.close()


def steps(directory: Path) -> Iterator[dict[str, Any]]:
    file = directory / "ledger.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # cut off by the kill
            continue


def trained(directory: Path) -> int:
    return sum(len(step["numbers"]) for step in steps(directory))


def fill(total: int) -> int:
    """Put parquet files of `total` bytes of text into the bucket; how many rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import s3fs

    files, rng, n = s3fs.S3FileSystem(), np.random.default_rng(0), 0
    files.mkdir(BUCKET)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ,.0123456789", np.uint8)
    while n * ROW_BYTES < total:
        texts = letters[rng.integers(0, len(letters), (FILE_ROWS, ROW_BYTES))]
        table = pa.table({"n": np.arange(n, n + FILE_ROWS), "text": [row.tobytes().decode() for row in texts]})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=GROUP, compression="none")
        files.pipe_file(f"{BUCKET}/part-{n:08}.parquet", sink.getvalue().to_pybytes())
        n += FILE_ROWS
    return n


def started(directory: Path, log: Path) -> subprocess.Popen:
    with log.open("a") as out:
        return subprocess.Popen(
            [sys.executable, "benchmarks/stream.py", "--read", str(directory)], cwd=ROOT, stdout=out, stderr=out
        )


def until(process: subprocess.Popen, directory: Path, rows: float, deadline_s: float = 3600.0) -> None:
    ends = time.monotonic() + deadline_s
    while trained(directory) < rows:
        if process.poll() is not None or time.monotonic() > ends:
            sys.exit(f"the reader stopped at {trained(directory)} rows:\n{(directory / 'log').read_text()[-3000:]}")
        time.sleep(1.0)


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        read(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--server", type=Path, default=ROOT.parent / "shared" / "tools" / "rgw.sh")
    asked = parser.parse_args()
    if not asked.server.exists():
        sys.exit(f"benchmarks/stream.py needs a script that runs an S3 server: {asked.server} is not there (--server)")
    os.environ |= {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
        "AWS_DEFAULT_REGION": "default",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as scratch:
        server, directory = Path(scratch) / "server", Path(scratch) / "reader"
        directory.mkdir()
        subprocess.run(
            ["bash", str(asked.server), "start", str(server), str(PORT), KEY, SECRET], check=True, timeout=300
        )
        try:
            began = time.perf_counter()
            rows = fill(int(asked.gib * 2**30))
            print(f"{rows:,} rows in the bucket after {time.perf_counter() - began:.0f} s", flush=True)
            began = time.perf_counter()
            reader = started(directory, directory / "log")
            until(reader, directory, rows / 3)
            pid = int((server / "run" / "client.rgw.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
            os.kill(pid, signal.SIGKILL)
            time.sleep(20)
            subprocess.run(command, check=True, timeout=60)
            at_stop = trained(directory)
            until(reader, directory, 2 * rows / 3)
            reader.kill()
            reader.wait(60)
            saved = pickle.loads((directory / "state.pkl").read_bytes())["step"]
            done = list(steps(directory))
            kept = [step for step in done if step["step"] <= saved]
            (directory / "ledger.jsonl").write_text("".join(json.dumps(step) + "\n" for step in kept))
            reader = started(directory, directory / "log")
            until(reader, directory, rows)
            if reader.wait(600):
                sys.exit(f"the reader failed:\n{(directory / 'log').read_text()[-3000:]}")
            spent = time.perf_counter() - began
        finally:
            subprocess.run(["bash", str(asked.server), "stop", str(server)], check=False, timeout=60)
        last = list(steps(directory))
        counts = np.bincount([n for step in last for n in step["numbers"]], minlength=rows)
        retries = (directory / "log").read_text().count("trying again")
    found = {
        "rows": rows,
        "lost": int((counts == 0).sum()),
        "repeated": int((counts > 1).sum()),
        "added_mb": max(s["added_mb"] for s in [*done, *last]),
        "retries": retries,
        "steps_done_again": len(done) - len(kept),
        "seconds": round(spent, 1),
        "rows_when_the_server_was_back": at_stop,
    }
    print(json.dumps(found))
    RESULTS.write_text(
        "# Streaming from S3\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/stream.py', *sys.argv[1:]])}`  \nHardware: {cpu()}; "
        "Ceph RADOS gateway beside it, objects in memory  \n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"{rows:,} rows, {asked.gib:g} GiB of parquet ({GROUP:,} rows a group), "
        f"read once by {PARTITIONS} partitions into sequences of {SEQ_LEN:,} tokens.\n\n"
        "| what | found |\n|---|---|\n"
        f"| rows lost / repeated | {found['lost']} / {found['repeated']} |\n"
        "| memory that the reader added, at most (peak, over what it had when it had loaded torch) "
        f"| {found['added_mb']:.0f} MB (bound {BOUND_MB}) |\n"
        f"| server ended for 20 s at a third | went on, after {retries} repeated requests |\n"
        f"| reader killed at two thirds | went on from its state, {found['steps_done_again']} steps done again |\n"
        f"| seconds, the 20 and two starts included | {spent:.0f} ({rows * ROW_BYTES / spent / 1e6:.0f} MB/s) |\n"
    )
    sys.exit(1 if found["lost"] or found["repeated"] or found["added_mb"] > BOUND_MB or not retries else 0)


if __name__ == "__main__":
    main()
