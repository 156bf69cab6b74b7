"""A Ray of a run's own whose servers are slow at their start: it is started again while there is time,
and after that it is one sentence."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

CODE = """
    import sys, tempfile, threading, time
    from pathlib import Path

    import psutil

    from ptf.compute.ray_session import ray_session
    from ptf.errors import Retryable

    times, within_s = int(sys.argv[1]), float(sys.argv[2])
    stopped, ended = [], threading.Event()

    def slow():  # each of the first raylets of this process's Rays is stopped as soon as it is there
        while not ended.wait(0.02) and len(stopped) < times:
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name() == "raylet" and process.pid not in stopped:
                        process.suspend()
                        stopped.append(process.pid)
                except psutil.Error:
                    continue

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        with ray_session(cpus=1, timeout_s=within_s, workdir=Path(sys.argv[3])):
            import ray
            print("ANSWER", ray.get(ray.remote(lambda: 41 + 1).remote(), timeout=120))
    except Retryable as error:
        print("REFUSED", error)
    finally:
        ended.set()
        thread.join()
    print("STOPPED", len(stopped), "LEFT", [str(p) for p in Path(tempfile.gettempdir()).glob("ptf-ray-*")])
"""


def started(where: Path, times: int, within_s: float) -> str:
    code = textwrap.dedent(CODE)
    line = [sys.executable, "-c", code, str(times), str(within_s), str(where)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_slow_start_is_tried_again(tmp_path: Path) -> None:
    said = started(tmp_path, 1, 300)
    assert said.count("starting it again") == 1
    assert "ANSWER 42" in said
    assert "STOPPED 1 LEFT []" in said


def test_what_does_not_start_in_time_is_one_sentence(tmp_path: Path) -> None:
    said = started(tmp_path, 9, 10)
    assert "REFUSED Ray did not start on this machine in " in said
    assert f"its logs are in {tmp_path / 'ray-logs'}" in said
    assert (tmp_path / "ray-logs").is_dir()
    assert "ANSWER" not in said
    assert said.strip().endswith("LEFT []")
