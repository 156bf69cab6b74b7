"""Clusters that somebody else has started with `ray start --head`: joined and submitted to,
with a token and without."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from tests.cluster.head import Head, running
from tests.tiny import arithmetic, job_file

pytestmark = pytest.mark.cluster
PTF = Path(sys.executable).with_name("ptf")
TOKEN = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def ordinary() -> Iterator[Head]:
    with running() as head:
        yield head


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with running({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}) as head:
        yield head


def trained(where: Path, head: Head, address: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A tiny SFT by two workers there, as a command of a process that has these variables of Ray's alone."""
    raw: dict[str, Any] = arithmetic(where)
    raw["train"] |= {"steps": 4, "validate_every": 0}
    raw["compute"] = {
        "launcher": "ray",
        "address": address,
        "workers": 2,
        "threads": 1,
        "device": "cpu",
        "timeout_s": 120,
    }
    line = [str(PTF), "train", job_file(raw, where), "--run-name", "a"]
    return subprocess.run(line, env=head.env | variables, capture_output=True, text=True, timeout=500, check=False)


def steps(where: Path) -> list[int]:
    return [row["step"] for row in read_metrics(where / "runs" / "a" / "metrics.jsonl")]


@pytest.mark.parametrize("way", ["address", "jobs"])
def test_an_ordinary_cluster_is_joined_and_submitted_to(ordinary: Head, tmp_path: Path, way: str) -> None:
    done = trained(tmp_path, ordinary, getattr(ordinary, way))
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert ("submitted to" in done.stdout) == (way == "jobs")


@pytest.mark.parametrize("way", ["address", "jobs"])
def test_a_cluster_with_a_token_takes_whoever_has_it(guarded: Head, tmp_path: Path, way: str) -> None:
    done = trained(tmp_path, guarded, getattr(guarded, way), RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert TOKEN not in done.stdout + done.stderr
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


@pytest.mark.parametrize("way", ["address", "jobs"])
def test_one_that_does_not_fit_is_one_sentence_with_the_variable(
    ordinary: Head, guarded: Head, tmp_path: Path, way: str
) -> None:
    cases: list[tuple[Head, dict[str, str], str]] = [
        (guarded, {}, "needs a token, and there is none in"),
        (guarded, {"RAY_AUTH_TOKEN": TOKEN[::-1]}, "refuses the token in RAY_AUTH_TOKEN"),
        (
            ordinary,
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
            "has no token, but RAY_AUTH_MODE is token here",
        ),
    ]
    for number, (head, variables, said) in enumerate(cases):
        where = tmp_path / str(number)
        where.mkdir()
        done = trained(where, head, getattr(head, way), **variables)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stdout
        assert not steps(where)


def test_an_evaluation_by_an_engine_beside_a_submitted_training_has_a_ray_of_its_own(
    ordinary: Head, tmp_path: Path
) -> None:
    """The job runs on the cluster, but what it made is evaluated here,
    where `http://…` is nothing that can be joined."""
    assert trained(tmp_path, ordinary, ordinary.jobs).returncode == 0
    code = """
        import json, sys
        from pathlib import Path
        from ptf.config import load
        from ptf.evaluate.measurement import measure_run
        print("FOUND", json.dumps(measure_run(load(sys.argv[1]), Path(sys.argv[2]))))
    """
    job = yaml.safe_load((tmp_path / "runs" / "a" / "job.yaml").read_text())
    job["evaluate"] = {
        "sources": {"sums": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}},
        "engine": "vllm",
        "limit": 4,
        "samples_per_prompt": 1,
        "max_new_tokens": 4,
        "reward": {"use": "ptf.tasks.arithmetic:exact"},
    }
    job["publish"] = {"gate": "unmeasured"}
    job["data"]["validation"], job["compute"]["address"] = {}, ordinary.jobs
    (tmp_path / "evaluate.yaml").write_text(yaml.safe_dump(job))
    line = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "evaluate.yaml"), str(tmp_path / "runs" / "a")]
    done = subprocess.run(line, env=ordinary.env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
    assert "greedy_pass_rate/sums" in found
