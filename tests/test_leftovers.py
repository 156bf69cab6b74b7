"""The control of tests/leftovers.py: a session fails that leaves something, and names it; one that tidies up passes."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.child import run_python

ROOT = Path(__file__).parents[1]
TIDY = """
import socket, subprocess, sys, tempfile
def test_tidy():
    with tempfile.TemporaryDirectory(), socket.create_server(("127.0.0.1", 0)):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
"""
LEAVES = {
    "process": (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)",
        "process ",
    ),
    "orphan without the variable": (
        (
            "subprocess.Popen([sys.executable, '-c', 'import os, time; os.fork(); time.sleep(600)'], env={}, "
            "start_new_session=True); time.sleep(3)"
        ),
        "process ",
    ),
    "port": ("left.append(socket.create_server(('127.0.0.1', 0)))", "port of this process: 127.0.0.1:"),
    "file": ("open(f'/dev/shm/suite_{os.getpid()}_test', 'w').close()", "shared memory: /dev/shm/suite_"),
    "directory": ("tempfile.mkdtemp(prefix='left-')", "temporary: "),
}


def session(place: Path, text: str) -> tuple[int, str]:
    (place / "test_it.py").write_text(text)
    asked = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.leftovers", "--rootdir", place]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SUITE_GRACE_S": "1"}
    done = run_python(*asked, place / "test_it.py", env=env, cwd=place)
    return done.returncode, done.stdout + done.stderr


def test_a_session_that_tidies_up_passes(tmp_path):
    status, said = session(tmp_path, TIDY)
    assert status == 0, said
    assert "left behind" not in said


def test_a_session_that_leaves_something_fails_and_names_it(tmp_path):
    body = "\n    ".join(line for line, _ in LEAVES.values())
    status, said = session(
        tmp_path, f"import os, socket, subprocess, sys, tempfile, time\nleft = []\ndef test_untidy():\n    {body}\n"
    )
    assert status == 1, said
    for name, (_, line) in LEAVES.items():
        assert line in said, f"{name}: {said}"
    left = [int(word.split()[1].rstrip(":")) for word in said.splitlines() if word.strip().startswith("process ")]
    assert len(left) >= 3
    # and it is gone now
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in left)
    assert not list(Path("/dev/shm").glob("suite_*_test"))


def test_other_processes_do_not_count(tmp_path):
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        status, said = session(tmp_path, TIDY)
        assert status == 0, said
        assert beside.poll() is None
    finally:
        beside.kill()
        beside.wait()
