"""What a user can mend is one sentence and an exit status, never a traceback: disks,
files of ours that others wrote into, numbers, markup."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ptf import cli, storage
from ptf.artifact import Artifact
from ptf.config import Plugin, loads
from ptf.data.trajectory import NoResult, Reward
from ptf.errors import UserError
from ptf.rl.rewards.scoring import RewardWorkers
from ptf.storage import published_versions
from ptf.workspace import disk
from steps.retrain import has_new_data
from tests.tiny import arithmetic, job_file

SMALL = 'mount -t tmpfs -o size={size}k tmpfs "$0" && exec "$@"'


def short(tmp_path: Path, **changes: object) -> Path:
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    return Path(job_file(raw | changes, tmp_path))


@pytest.mark.long
def test_a_full_disk_under_checkpoints_is_named_with_what_is_needed(tmp_path):
    config, place = short(tmp_path), tmp_path / "small"
    place.mkdir()
    apart = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL.format(size=400), str(place)]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets no user mount a small disk")
    command = [*apart, sys.executable, "-m", "ptf.cli", "train", str(config), "--run-name", "a"]
    command += ["--set", f"checkpoint.to={place}"]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"no space is left on the disk at {place}" in done.stderr
    assert "GiB are needed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_elsewhere_is_one_sentence(tmp_path):
    with (
        pytest.raises(UserError, match=r"no space is left on the disk at .*GiB are free"),
        disk.disk_errors_as_user_errors(tmp_path),
        open("/dev/full", "w") as full,
    ):
        full.write("x" * 100_000)
    # the control: what is not the disk's stays what it is
    with pytest.raises(ZeroDivisionError), disk.disk_errors_as_user_errors(tmp_path):
        raise ZeroDivisionError


@pytest.mark.parametrize("output", ["/sys/runs", "/dev/null/runs"])
def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path, capsys, output):
    config = short(tmp_path, output=output)
    assert cli.main(["train", str(config), "--run-name", "a"]) == 2
    said = capsys.readouterr().err
    assert output.rpartition("/")[0] in said
    assert "choose a different directory" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"{}", b"[]", b"", None])
def test_a_record_of_retraining_that_cannot_be_read_is_one_sentence(tmp_path, content):
    job = loads(short(tmp_path, publish={"to": str(tmp_path / "versions"), "metric": "loss/held_out"}).read_text())
    storage.finish(f"{job.versions}/one", {"version": "one", "data": {"sums": "then"}}, {})
    published_versions.point(job.versions, "one", None)
    file = Path(job.versions) / "retrained.json"
    assert has_new_data(job, Artifact("a", data={"sums": "now"}))  # the control: there is none
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=r"retrained\.json cannot be read.*remove it"):
        has_new_data(job, Artifact("a", data={"sums": "now"}))
    if content is not None:
        storage.write_record(str(file), {"lineage": "x", "how": "was published", "data": {}})
        assert has_new_data(job, Artifact("a", data={"sums": "now"}))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--mfu", value) for value in ("2", "nan", "0")),
        *(("--gpu-memory-gib", value) for value in ("-1", "inf")),
        ("--workers", "0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", str(short(tmp_path)), "--workers", "8", option, value])
    assert left.value.code == 2
    assert option in capsys.readouterr().err


def test_markup_in_a_message_stands_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", ":x:[bold].yaml"]) == 2
    assert ":x:[bold].yaml" in capsys.readouterr().err
    cli.console().print("a :x: b", markup=False)
    assert capsys.readouterr().out == "a :x: b\n"


def big(row: dict, text: str) -> float:
    return float(text)


def test_a_reward_beyond_what_training_can_count_is_no_result():
    with closing(RewardWorkers(Plugin(use="tests.test_plain_errors:big"), retries=0)) as rewards:
        found = rewards.score([({}, text) for text in ("1", "1e308", "-1e308", "nan", "inf", "1e12")])
    assert [type(outcome) for outcome in found] == [Reward, NoResult, NoResult, NoResult, NoResult, Reward]
    assert "the reward is 1e+308, not a number from -1e+12 to 1e+12" in found[1].reason  # type: ignore[union-attr]
