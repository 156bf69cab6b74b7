"""Two resumes of one killed run at once, and what becomes of each.

Every attempt is a process forked from this one, which has imported everything but never trained. On disk the two share
the run's directory; in an object store they share its checkpoints alone, as two machines do.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch._dynamo  # noqa: F401  so that forked processes need not import it
import yaml

import ptf.train.loop  # noqa: F401  nor this
from ptf import storage
from ptf.compute.tracking import is_clock, read_metrics
from ptf.config import loads
from ptf.run import run
from ptf.storage import file_verification
from tests.reliability.kills import job
from tests.waiting import until

DEADLINE_S = 180.0
SERVES = """
import logging, sys, time
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def object_store(bucket: str) -> Iterator[str]:
    """A server of S3's protocol in a process of its own, whose address is in the environment; its bucket's URI."""
    server = subprocess.Popen([sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        # in another process: what s3fs keeps must not be forked
        made = "import sys, s3fs; s3fs.S3FileSystem().mkdir(sys.argv[1])"
        subprocess.run([sys.executable, "-c", made, bucket], check=True)
        yield f"s3://{bucket}"
    finally:
        server.kill()
        server.wait()


class Attempt:
    """A process that trains `raw` under a name, and what it prints."""

    def __init__(self, raw: dict[str, Any], run_name: str, log: Path, delay: float = 0.0) -> None:
        self.log, self.directory, self.status = log, Path(raw["output"]) / run_name, None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            time.sleep(delay)
            run(loads(yaml.safe_dump(raw)), run_name)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if done else None
        return self.status

    def wait(self) -> int:
        until(lambda: self.poll() is not None, DEADLINE_S, 0.005)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def bits(directory: Path, root: str) -> dict[str, Any]:
    """What a finished run left: rows of metrics by step, without what a clock made; the exported weights; the SHA-256
    of the state of its last checkpoint (weights and optimizer)."""
    rows = {
        row["step"]: {k: v for k, v in row.items() if not is_clock(k)}
        for row in read_metrics(directory / "metrics.jsonl")
    }
    manifest = file_verification.verify(
        max(uri.rpartition("/")[0] for uri in storage.listing(f"{root}/step_*/{storage.MANIFEST}"))
    )
    state = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".distcp")}
    return {
        "step": manifest["step"],
        "metrics": rows,
        "state": state,
        "model": (directory / "model" / "model.safetensors").read_bytes(),
    }


class Trials:
    """Over one store; `bucket`: a URI below which checkpoints lie, none where they lie with the run."""

    def __init__(self, directory: Path, bucket: str | None) -> None:
        self.directory, self.bucket = directory, bucket
        directory.mkdir(parents=True, exist_ok=True)
        self.raw = job(directory)
        self.raw["train"] |= {"steps": 24, "validate_every": 8}
        self.raw["checkpoint"] |= {"every": 5, "to": bucket}
        attempt = Attempt(self.raw, "whole", directory / "whole.log")
        began = time.monotonic()
        assert attempt.wait() == 0, attempt.said
        self.seconds = time.monotonic() - began
        self.whole = bits(attempt.directory, self.root(attempt))

    def root(self, attempt: Attempt) -> str:
        return f"{self.bucket}/{attempt.directory.name}" if self.bucket else f"{attempt.directory}/checkpoints"

    def trial(self, number: int, rng: Random, kill_holder: bool) -> dict[str, Any]:
        """How it went: `wrong` says what should not have been."""
        run_name, place = f"run-{number}", self.directory / f"trial-{number}"
        place.mkdir()
        places = [self.raw["output"], self.raw["output"] if self.bucket is None else str(place / "elsewhere")]
        first = Attempt(self.raw, run_name, place / "first.log")
        until(lambda: "step " in first.said or first.poll() is not None, DEADLINE_S, 0.005)
        time.sleep(rng.uniform(0, 0.5 * self.seconds))
        first.kill()
        delay = rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.5)])
        two = [
            Attempt(self.raw | {"output": output}, run_name, place / f"{n}.log", n * delay)
            for n, output in enumerate(places)
        ]
        killed = False
        if kill_holder:
            until(lambda: any(one.poll() is not None for one in two), DEADLINE_S, 0.005)  # one was refused
            holder = next((one for one in two if one.poll() is None), None)
            if holder is not None:
                holder.kill()
                killed = holder.status == -signal.SIGKILL
                two = [one for one in two if one is not holder]
                two.append(Attempt(self.raw | {"output": str(holder.directory.parent)}, run_name, place / "third.log"))
        for one in two:
            one.wait()
        return {"delay": delay, "killed": killed, **self.judged(two)}

    def judged(self, attempts: list[Attempt]) -> dict[str, Any]:
        wrong, refused, ended = [], 0, 0
        for one in attempts:
            if one.status == 0:
                ended += 1
                wrong += [f"{one.log.name}: {name} differs" for name in self.differs(one)]
            elif re.search(
                r"(RunInUse: .* is being written by process \d+ on \S+, since .*run this again|LeaseLost: "
                r".* taken over by)",
                one.said,
            ):
                refused += 1
            else:
                wrong.append(f"{one.log.name}: ended with {one.status}: {one.said[-300:]}")
            if "waiting up to" in one.said or "gave no heartbeat" in one.said:
                wrong.append(f"{one.log.name}: it waited")
        if not ended:
            wrong.append("nobody ended")
        return {"ended": ended, "refused": refused, "wrong": wrong}

    def differs(self, one: Attempt) -> list[str]:
        """Of a run in a directory of its own, rows begin with the step after the checkpoint that it went on from."""
        found = bits(one.directory, self.root(one))
        rows, whole = found.pop("metrics"), self.whole["metrics"]
        names = [name for name, value in found.items() if value != self.whole[name]]
        same = all(whole.get(step) == row for step, row in rows.items()) and (not rows or max(rows) == max(whole))
        alone = self.bucket is None and rows.keys() != whole.keys()
        return names + ([] if same and not alone else ["metrics"])


def main() -> None:
    """`python -m tests.reliability.resumes DIRECTORY disk|s3 TRIALS [SEED]`: a JSON line for each trial."""
    directory, store, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int((sys.argv[4:] or ["0"])[0])
    with contextlib.ExitStack() as held:
        bucket = held.enter_context(object_store("checkpoints")) if store == "s3" else None
        # What reads the store in this process would leave s3fs's thread and locks to those that are forked after it:
        # a child of its own does it.
        trials, rng = Trials(directory, bucket), Random(f"{store}/{seed}")
        for number in range(count):
            print(json.dumps(trials.trial(number, rng, kill_holder=number % 3 == 2)), flush=True)


if __name__ == "__main__":
    main()
