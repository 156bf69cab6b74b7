"""A launcher hears which rank was stopped and which one hangs, and keeps quiet about those that work."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from ptf.compute import heartbeat
from ptf.compute.gang import Gang
from ptf.compute.heartbeat import ADDRESS, Clock, Monitor
from ptf.compute.world import joined

CHILD = """
import sys, time
from ptf.compute.heartbeat import Clock, beating
clock = Clock()
with beating(clock, 1):
    for clock.step in range(1, 7):
        print("made step", clock.step)
        with clock.phase("forward_backward"):
            time.sleep(0.05)
    with clock.phase(sys.argv[1]):
        time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_S", 2.0)
    monkeypatch.setattr(heartbeat, "PAUSE_S", 1.0)


class Child:
    """A process that works as rank 1, and what a monitor says of it."""

    def __init__(self, phase: str, seconds: float) -> None:
        self.monitor, self.news = Monitor("train"), []
        env = {**os.environ, ADDRESS: self.monitor.address}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, phase, str(seconds)], env=env, stdout=subprocess.DEVNULL
        )

    def hear(self, text: str, seconds: float) -> bool:
        """Look twice a second until some news has the text."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.news += self.monitor.poll([0, 1])
            if any(text in line for line in self.news):
                return True
            time.sleep(0.5)
        return False

    def begun(self) -> bool:
        deadline = time.monotonic() + 60
        while "made step 6" not in self.monitor.describe(1) and time.monotonic() < deadline:
            self.monitor.poll([0, 1])
            time.sleep(0.1)
        return "made step 6" in self.monitor.describe(1)


@pytest.fixture
def child():
    children: list[Child] = []

    def start(phase: str, seconds: float = 60.0) -> Child:
        children.append(Child(phase, seconds))
        assert children[-1].begun()
        return children[-1]

    yield start
    for one in children:
        one.process.kill()
        one.process.wait()


@pytest.mark.long
def test_a_stopped_rank_is_named_with_step_phase_place_and_last_lines_and_once(child):
    rank = child("export")
    rank.process.send_signal(signal.SIGSTOP)
    assert rank.hear("has not answered", 10), rank.news
    (said,) = rank.news
    assert said.startswith("train rank 1 has not answered for ")
    assert "step 6, export for " in said
    assert ", at <string>:11 in <module>; its last lines:" in said
    assert said.endswith(
        "\n    | made step 2\n    | made step 3\n    | made step 4\n    | made step 5\n    | made step 6"
    )
    assert not rank.hear("nothing more to say", 1.5)
    assert rank.news == [said]
    rank.process.send_signal(signal.SIGCONT)
    assert rank.hear("train rank 1 continues", 10), rank.news


def test_a_rank_that_hangs_in_a_phase_whose_length_is_known_is_named(child):
    rank = child("forward_backward")
    assert rank.hear("seem to be stuck", 10), rank.news
    assert rank.news[1].startswith("  rank 1: step 6, forward_backward for ")


@pytest.mark.parametrize(("times", "for_s", "stuck"), [(2, 99.0, False), (3, 3.0, False), (3, 3.1, True)])
def test_a_phase_is_judged_by_its_longest_run_once_it_has_ended_three_times(times, for_s, stuck):
    beat = {"number": 1, "ended": False, "step": 4, "phase": "update", "where": "here", "lines": []}
    monitor = Monitor("train")
    assert monitor._store is not None
    monitor._store.set("1", json.dumps({**beat, "times": times, "for_s": for_s, "longest_s": 1.0}))
    found = monitor.poll([0, 1])
    assert [line for line in found if "seem to be stuck" in line] == (found[:1] if stuck else [])
    assert bool(found) == stuck
    monitor.close()


@pytest.mark.long
def test_a_rank_in_a_phase_that_it_has_not_been_in_is_left_alone(child):
    rank = child("export")
    assert not rank.hear("rank 1", 3.5), rank.news


def test_a_rank_that_has_ended_is_not_missed(child):
    rank = child("export", 0.1)
    rank.process.wait(30)
    assert not rank.hear("rank 1", 3), rank.news
    assert rank.monitor.silent_seconds(1) == 0


def test_a_launcher_that_was_stopped_itself_does_not_blame_its_ranks(child, monkeypatch):
    rank = child("export")
    now = time.monotonic
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now() + 1000)
    assert not rank.hear("rank 1", 2)
    assert rank.monitor.silent_seconds(1) < heartbeat.PAUSE_S + 1


def test_a_launcher_that_cannot_be_reached_does_not_stop_the_work(monkeypatch, capsys):
    monkeypatch.setattr(heartbeat, "CONNECT_S", 0.5)
    monkeypatch.setenv(ADDRESS, "127.0.0.1:1")
    with heartbeat.beating(Clock(), 3):
        assert "rank 3 cannot reach its launcher at 127.0.0.1:1" in capsys.readouterr().out


def test_progress_bars_and_long_lines_are_kept_short():
    kept: deque[str] = deque(maxlen=heartbeat.LINES)
    tail = heartbeat.Tail(io.StringIO(), kept)
    for i in range(100):
        tail.write(f"\r{i} %" + "x" * 1000)
    assert len(tail._open) <= heartbeat.LONG
    assert [line.split()[0] for line in kept] == ["94", "95", "96", "97", "98"]


def test_the_place_of_a_library_installed_ptf_is_found(monkeypatch):
    """In site-packages as ptf itself may be, its frames count; other libraries' do not. In a thread of its own: of
    whoever runs tests nothing is below it."""

    def place() -> str:
        return heartbeat.code_location(threading.get_ident())

    monkeypatch.setattr(heartbeat, "ELSEWHERE", (str(heartbeat.Path(__file__).parents[2]), *heartbeat.ELSEWHERE))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(place).result().startswith(heartbeat.__file__)
        monkeypatch.setattr(heartbeat, "OURS", "nowhere")
        assert pool.submit(place).result() == "no code of ptf or of the user"


def test_seconds_of_phases_are_their_own_and_add_up():
    clock, began = Clock(), time.monotonic()
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.03)
    time.sleep(0.01)
    taken, spent = clock.take(), time.monotonic() - began
    assert taken.keys() == {"seconds/outer", "seconds/inner", "seconds/other"}
    assert taken["seconds/outer"] >= 0.02
    assert taken["seconds/inner"] >= 0.03
    assert taken["seconds/other"] >= 0.01
    assert sum(taken.values()) == pytest.approx(spent, abs=1e-3)
    assert "seconds/inner" not in clock.take()


def test_the_place_of_a_thread_is_in_code_that_is_not_the_librarys():
    def parse() -> None:
        json.loads("1", parse_int=lambda _: found.append(heartbeat.code_location(threading.get_ident())))

    found: list[str] = []
    parse()
    assert found[0].startswith(heartbeat.__file__)  # the innermost of ours is the one that asks


@pytest.mark.cluster
@pytest.mark.ray
def test_a_stopped_worker_of_a_gang_is_named_and_ends_the_run_at_the_deadline(ray_cluster, capsys):
    def work(rank: int) -> None:
        with joined("cpu", 300) as world:
            for world.clock.step in range(1, 4):
                print(f"rank {rank} was here", flush=True)
                with world.clock.phase("forward_backward"):
                    time.sleep(0.1)
            if rank == 1:
                with world.clock.phase("optimizer"):
                    time.sleep(2 * heartbeat.BEAT_S)
                    os.kill(os.getpid(), signal.SIGSTOP)
            world.barrier()

    with closing(Gang("train", workers=2, timeout_s=120)) as gang:
        gang.timeout_s = 3
        pid = gang.members[1].pid
        with pytest.raises(
            RuntimeError,
            match=rf"train rank 1 \(actor \w+, pid {pid}.*sent no heartbeat for \d+ s while doing .*3, optimizer",
        ) as caught:
            gang.execute(work, [(0,), (1,)], timeout_s=float("inf"))
        assert "| rank 1 was here" in str(caught.value)
        assert "rank 0 (" not in str(caught.value)
    assert "train rank 1 has not answered for" in capsys.readouterr().out


def test_a_heartbeat_says_where_a_process_is_and_what_it_printed_last(monkeypatch, capsys):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monitor, clock = Monitor("train"), Clock()
    monkeypatch.setenv(ADDRESS, monitor.address)
    clock.step = 4
    with heartbeat.beating(clock, 1), clock.phase("update"):
        print("made step 4")
        deadline = time.monotonic() + 30
        while "made step 4" not in monitor.describe(1) and time.monotonic() < deadline:
            assert monitor.poll([1]) == []
            time.sleep(0.02)
        said = monitor.describe(1)
    assert "step 4, update for " in said
    assert said.endswith("; its last lines:\n    | made step 4")
    assert capsys.readouterr().out == "made step 4\n"
    monitor.close()
