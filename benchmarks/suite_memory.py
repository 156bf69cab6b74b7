"""Memory of the test suite: the peak of the PSS (proportional set size: shared pages are counted once) of pytest and of
every process that comes of it (xdist workers, Ray, vLLM, gangs), with the tests and the processes that made it. Exits 1
where the peak is above the limit.

    python benchmarks/suite_memory.py [--limit GIB] [--interval SECONDS] [TESTS]

TESTS is what pytest is to run; default: the whole suite in two processes.

This process is made the reaper of all its descendants, so that daemons which leave their parents are still found below
it.
"""

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = ["-n", "2", "-m", "not cluster and not s3 and not e2e"]  # with the longer tests, which take the most
TIMES = "PTF_SUITE_TIMES"  # the file that the pytest plugin below writes when tests begin and end
PR_SET_CHILD_SUBREAPER = 36
Sample = tuple[float, dict[int, int]]  # when; bytes of each process


def pytest_runtest_logstart(nodeid: str) -> None:
    _note("begin", nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _note("end", nodeid)


def _note(what: str, nodeid: str) -> None:
    if TIMES in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:  # workers' reports come to the first process
        with open(os.environ[TIMES], "a") as file:
            file.write(f"{time.monotonic()} {what} {nodeid}\n")


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children[parent].append(pid)
    found, ahead = [], [root]
    while ahead:
        ahead += (below := children[ahead.pop()])
        found += below
    return found


def pss(pid: int) -> int:
    """Bytes; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return ""
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)[:90]


def reap(main: int) -> int | None:
    """Collects what has ended, ours and orphans; the exit status of `main` once it is among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == main:
            status = os.waitstatus_to_exitcode(code)


def watch(arguments: list[str], times: Path, interval: float) -> tuple[int, list[Sample], dict[int, str]]:
    """pytest's exit status, samples, and the commands of the processes."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("this system does not let a process adopt its descendants (PR_SET_CHILD_SUBREAPER)")
    line = [sys.executable, "-m", "pytest", "-p", "benchmarks.suite_memory", *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, TIMES: str(times), "PYTHONPATH": path}
    # a shell may have it ignored for what runs behind
    main = os.posix_spawn(sys.executable, line, env, setsigdef=[signal.SIGINT])
    # pytest has it too, ends by itself, and what was seen is still reported
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(main, signal.SIGINT))
    samples: list[Sample] = []
    commands: dict[int, str] = {}
    while (status := reap(main)) is None:
        found = {pid: size for pid in descendants(os.getpid()) if (size := pss(pid))}
        commands |= {pid: command for pid in found if (command := command_of(pid))}  # Ray's workers change theirs
        samples.append((time.monotonic(), found))
        time.sleep(interval)
    return status, samples, commands


def spans(times: Path) -> list[tuple[str, float, float]]:
    """Of each test: when it began and ended."""
    began: dict[str, float] = {}
    found = []
    for line in times.read_text().splitlines():
        at, what, nodeid = line.split(" ", 2)
        if what == "begin":
            began[nodeid] = float(at)
        else:
            found.append((nodeid, began.pop(nodeid), float(at)))
    return found + [(nodeid, at, float("inf")) for nodeid, at in began.items()]


def report(samples: list[Sample], commands: dict[int, str], tests: list[tuple[str, float, float]]) -> float:
    """Prints it; the peak in GiB."""

    def gib(size):
        return f"{size / 2**30:6.2f} GiB"

    at, peak = max(samples, key=lambda sample: sum(sample[1].values()))
    print(
        f"\nPeak PSS {gib(sum(peak.values())).strip()}, {at - samples[0][0]:.0f} s after the start, "
        f"of {len(peak)} processes:"
    )
    for pid, size in Counter(peak).most_common(12):
        print(f"  {gib(size)}  {commands.get(pid, '?')}")
    print("in " + ", ".join(name for name, began, ended in tests if began <= at <= ended))
    most = Counter[str]()
    for name, began, ended in tests:
        most[name] = max((sum(sizes.values()) for t, sizes in samples if began <= t <= ended), default=0)
    print("Peak while these tests ran, the heaviest first:")
    for name, size in most.most_common(15):
        print(f"  {gib(size)}  {name}")
    return sum(peak.values()) / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--limit", type=float, default=12.0, help="GiB")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two samples")
    known, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        times = Path(name) / "times"
        times.touch()
        status, samples, commands = watch(arguments or SUITE, times, known.interval)
        peak = report(samples, commands, spans(times))
    if peak > known.limit:
        print(f"above the limit of {known.limit:g} GiB")
    return status or int(peak > known.limit)


if __name__ == "__main__":
    sys.exit(main())
