"""What is half-made lies under names of ours, locked by who makes it: it is removed by the next run if that one was
killed, and never while it works."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ptf import storage
from ptf.config import loads
from ptf.run import remove_leftovers
from ptf.workspace import scratch
from tests.tiny import arithmetic

KILLED = """
import os, sys, time
from pathlib import Path
from ptf.workspace import scratch
from ptf.data.prepare import prepare
from ptf.storage.writing import replacing

def plugin(directory):
    Path(directory, "half").write_text("x")
    with replacing(Path(sys.argv[1], "run", "metrics.json")) as part:
        part.write_text("y")
        print("made", flush=True)
        time.sleep(600)

prepare(plugin, "key", f"{sys.argv[1]}/prepared")
"""


def names(root: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in root.rglob("*") if path.name.startswith(scratch.PREFIX))


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_makes_is_not(tmp_path, capsys):
    job = loads(yaml.safe_dump({**arithmetic(tmp_path), "output": str(tmp_path)}))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    assert names(tmp_path) == ["partial-key", "partial-metrics"]
    remove_leftovers(job, "run")  # the control: it is at work
    assert names(tmp_path) == ["partial-key", "partial-metrics"]
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    remove_leftovers(job, "run")
    assert names(tmp_path) == []
    assert capsys.readouterr().out.count("which a killed process had left") == 2
    assert (tmp_path / "train.jsonl").exists()


def test_a_name_that_is_not_ours_stays(tmp_path):
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "partial-x").touch()
    assert scratch.sweep(tmp_path, 3) == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("make", [scratch.directory, scratch.file])
def test_it_is_gone_after_an_error_and_stays_where_it_was_renamed_to(tmp_path, make):
    with pytest.raises(ZeroDivisionError), make(tmp_path / "a"):
        raise ZeroDivisionError
    with make(tmp_path / "a") as part:
        part.rename(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_was_swept_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    hold, swept = scratch.hold, []

    def slow(path: Path) -> int | None:
        if not swept:
            swept.extend(scratch.sweep(tmp_path, 0))
        return hold(path)

    monkeypatch.setattr(scratch, "hold", slow)
    storage.write_text(str(tmp_path / "a"), "text")
    assert len(swept) == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "text")]
