"""A gang is one process group, and every way it can fail is named: an error keeps its type,
a death and a deadline name the rank."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import ray
from ray._raylet import get_authentication_mode

from ptf.compute.gang import Gang, layout, make_pool
from ptf.compute.ray_session import ray_session
from ptf.compute.reaper import OWNER, PREFIX, end_abandoned, family
from ptf.compute.world import joined
from ptf.errors import UserError
from ptf.workspace import scratch
from tests.child import run_python
from tests.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def gang(ray_cluster):
    with closing(Gang("test", workers=2, timeout_s=300, env={"PTF_TEST": "yes"})) as gang:
        yield gang


def test_ranks_are_one_process_group_of_distinct_actors(gang):
    def total(start: float) -> tuple[float, int]:
        with joined("cpu", 30) as world:
            return float(world.sum(start + world.rank)), os.getpid()

    results = gang.execute(total, [(1.0,), (10.0,)])
    assert [value for value, _ in results] == [12.0, 12.0]
    assert [pid for _, pid in results] == [member.pid for member in gang.members]
    assert len({member.actor for member in gang.members}) == 2


def test_environment_of_the_workers(gang):
    names = ("PTF_TEST", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    first, second = gang.execute(lambda: {name: os.environ.get(name) for name in names}, [()] * 2)
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    assert first == {
        "PTF_TEST": "yes",
        "OMP_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": "1000",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    assert second["RANK"] == "1"


def test_an_error_keeps_type_message_and_the_rank_that_raised_it(gang):
    def fail(rank: int) -> None:
        if rank == 1:
            raise UserError("data.partitions must be even")

    with pytest.raises(UserError, match="partitions") as caught:
        gang.execute(fail, [(0,), (1,)])
    assert str(caught.value) == "data.partitions must be even"
    assert f"rank 1 (actor {gang.members[1].actor[:8]}, pid {gang.members[1].pid}" in caught.value.__notes__[0]
    assert "fail" in caught.value.__notes__[0]


def test_the_error_that_explains_the_others_is_raised(gang):
    def fail(rank: int) -> None:
        with joined("cpu", 30) as world:
            if rank == 1:
                raise ValueError("the cause")
            world.sum(0.0)  # fails in its turn, because rank 1 left

    with pytest.raises(ValueError, match="the cause"):
        gang.execute(fail, [(0,), (1,)])


def test_a_deadline_names_who_is_late(gang):
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"rank 1 \(actor \w+, pid {gang.members[1].pid}.*did not finish .*sleep within 1 s"
    ):
        gang.execute(time.sleep, [(0,), (3,)], timeout_s=1)
    assert time.monotonic() - began < 2.5
    assert gang.execute(abs, [(-1,), (-2,)]) == [1, 2]


def test_a_dead_actor_is_named_at_once_and_leaves_no_process(ray_cluster):
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    gang = Gang("doomed", workers=2, timeout_s=300)
    pids = [member.pid for member in gang.members]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"doomed rank 1 \(actor \w+, pid {pids[1]}, node .*died while doing .*die"):
        gang.execute(die, [(0,), (1,)], timeout_s=float("inf"))
    assert time.monotonic() - began < 10
    gang.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)


def test_a_gang_returns_results_in_the_order_of_ranks_and_gives_its_places_back(ray_cluster):
    free = ray.available_resources()["CPU"]
    with closing(Gang("short", workers=2, timeout_s=300)) as gang:
        assert gang.execute(lambda shift: int(os.environ["RANK"]) + shift, [(5,), (5,)]) == [5, 6]
    until(lambda: ray.available_resources().get("CPU") == free, 10)


def test_workers_that_cannot_be_placed_are_refused_with_numbers(ray_cluster):
    with pytest.raises(RuntimeError, match="99 workers cannot be placed: every node"):
        make_pool([1] * 99, use_gpu=False, timeout_s=5)
    taken = make_pool([1] * 5, use_gpu=False, timeout_s=120)
    try:
        with pytest.raises(RuntimeError, match="no room for 8 workers after 1 s"):
            make_pool([1] * 8, use_gpu=False, timeout_s=1)
    finally:
        for group in taken.pgs:
            ray.util.remove_placement_group(group)


def test_layout_uses_few_nodes_and_puts_equally_many_on_each():
    assert layout(2, [8]) == [2]
    assert layout(8, [8, 8]) == [8]
    assert layout(16, [8, 8, 4]) == [8, 8]
    assert layout(6, [4, 2, 2]) == [2, 2, 2]
    with pytest.raises(RuntimeError, match="cannot be placed"):
        layout(5, [3, 3])


def test_a_session_inside_a_session_uses_it_and_leaves_it_running(ray_cluster):
    with ray_session(cpus=1):
        assert ray.is_initialized()
    assert ray.is_initialized()
    assert int(get_authentication_mode()) == 1  # token


def test_ray_listens_to_this_machine_alone_from_a_directory_of_this_user_alone(gang):
    home = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
    assert home.stat().st_mode & 0o777 == 0o700
    places = {
        (at.laddr.ip, process.name())
        for process in family(home)
        for at in process.net_connections()
        if at.status == psutil.CONN_LISTEN
    }
    ours = {name for _, name in places if name in ("raylet", "gcs_server")}
    assert ours == {"raylet", "gcs_server"}
    assert {ip for ip, _ in places} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_what_a_run_left_that_was_killed_with_its_reaper_goes_with_the_next(tmp_path):
    left, live, foreign = (tmp_path / f"{PREFIX}{name}" for name in ("left", "live", "foreign"))
    for home in (left, live, foreign):
        home.mkdir()
        (home / "r").mkdir()
    (left / OWNER).touch()
    (live / OWNER).touch()
    held = scratch.hold(live / OWNER)
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(left)])
    end_abandoned(tmp_path)
    stray.wait(60)
    assert [home.exists() for home in (left, live, foreign)] == [False, True, True]
    assert held is not None
    os.close(held)


DRIVER = """
    import os, time
    from pathlib import Path
    from ptf.compute.gang import Gang
    from ptf.compute.ray_session import ray_session
    from ptf.compute.reaper import family

    def here():
        return Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent

    with ray_session(cpus=2):
        home, inside = here(), len(family(here()))
    print("FIRST", inside, len(family(home)), home.exists(), flush=True)
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    with ray_session(cpus=2):
        gang = Gang("work", workers=1, timeout_s=300)
        print("READY", here(), flush=True)
        gang.execute(time.sleep, [(300,)], timeout_s=300)
"""


def test_no_process_file_or_directory_outlives_a_session_or_its_killed_driver(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    assert len(str(tmp_path)) > 40, "a TMPDIR too long for Ray's sockets"
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST"))}
    env = {**keep, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    child = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    said: dict[str, list[str]] = {}
    for line in child.stdout:
        said[line.split()[0]] = line.split()[1:]
        if "READY" in said:
            break
    inside, after, exists = said["FIRST"]
    assert (int(inside) > 5, int(after), exists) == (True, 0, "False")

    directory = Path(said["READY"][0])
    processes = psutil.Process(child.pid).children(recursive=True)
    assert len(processes) > 5
    child.kill()
    assert child.wait(timeout=120) == -signal.SIGKILL
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert [process.cmdline() for process in alive] == []
    assert family(directory) == []
    assert not directory.exists()
    assert not any((tmp_path / "home").rglob("*")), "something was written under the home directory"


def test_an_unreachable_cluster_is_said_to_be_one():
    code = inspect.cleandoc("""
        from ptf.compute.ray_session import ray_session
        with ray_session(address="127.0.0.1:9", timeout_s=1):
            pass
    """)
    done = run_python("-c", code, timeout=300)
    assert "Retryable: no Ray cluster answers at 127.0.0.1:9 after 1 s: " in done.stderr
