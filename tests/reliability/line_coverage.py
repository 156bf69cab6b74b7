"""Which tests run which lines of the package in the process of the tests, measured by coverage.py.

What is known of a file of tests holds while neither that file nor the package has changed, so a map that
was stopped goes on, and a new test costs only its own file.
"""

import json
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.reliability.isolated import TREE, Progress, run

LEFT_OUT = ("e2e", "flows", "workflow", "cluster", "gpu", "docs")  # directories of tests
BATCH_BYTES = 40_000  # of files of tests that are measured in one process


def git(root: Path, *words: str) -> str:
    """What git answers."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


class Measured(Progress):
    """Plugin of pytest: writes which lines of the package each test ran, and the seconds that it took."""

    def __init__(self, left_out: frozenset[str]) -> None:
        super().__init__(())
        self.left_out = left_out
        self.coverage = coverage.Coverage(data_file=None, source=[str(TREE / "ptf")], config_file=False)
        self.times: dict[str, float] = {}
        self.bad: list[str] = []

    def pytest_configure(self) -> None:
        self.coverage.start()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            i
            for i in items
            if i.nodeid not in self.left_out
            and not (i.get_closest_marker("ray") or "ray_cluster" in getattr(i, "fixturenames", ()))
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        began = time.monotonic()
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")
            self.times[item.nodeid] = round(time.monotonic() - began, 3)

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        if report.failed or report.skipped:
            self.bad.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        super().pytest_sessionfinish()
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            rows = data.contexts_by_lineno(file).items()
            lines[os.path.relpath(file, TREE)] = {str(line): names for line, names in rows}
        found = {"times": {t: s for t, s in self.times.items() if t not in self.bad}, "bad": self.bad, "lines": lines}
        with os.fdopen(os.dup(self.results), "w") as file:
            json.dump(found, file)


@dataclass(slots=True)
class LineMap:
    """The tests of each line, by file; seconds of each test; lines that run when their module is imported."""

    times: dict[str, float] = field(default_factory=dict)
    tests: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    imported: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def of(self, file: str, first: int, last: int) -> set[str]:
        """Tests that run any of these lines."""
        return set().union(*(tests for line, tests in self.tests[file].items() if first <= line <= last))

    def below(self, prefixes: Sequence[str]) -> set[str]:
        """Tests of these files or directories of tests."""
        return {test for test in self.times if test.startswith(tuple(prefixes))}


def test_files(root: Path) -> dict[str, str]:
    """The files of tests that are measured, and the hash of each."""
    listed = git(root, "ls-tree", "-r", "HEAD", "tests").splitlines()
    files = {path: about.split()[2] for about, path in (line.split("\t") for line in listed)}
    return {
        path: blob
        for path, blob in files.items()
        if re.fullmatch(r"tests/(?:.*/)?test_\w+\.py", path) and path.split("/")[1] not in LEFT_OUT
    }


def _parts(cache: Path) -> Iterator[dict[str, Any]]:
    """What was measured, the oldest first."""
    for path in sorted(cache.glob("part-*.json")):
        yield json.loads(path.read_text())


def read(root: Path, cache: Path) -> tuple[LineMap, list[str]]:
    """The map of the last commit, and the files of tests that it lacks."""
    found, known, files = LineMap(), dict[str, str](), test_files(root)
    parts = list(_parts(cache))
    for part in parts:
        known |= part["files"]
    for part in parts:
        valid = {file for file, blob in part["files"].items() if files.get(file) == blob == known[file]}
        times = {test: s for test, s in part["times"].items() if test.partition("::")[0] in valid}
        found.times |= times
        for file, lines in part["lines"].items():
            for line, tests in lines.items():
                found.tests[file][int(line)] |= times.keys() & set(tests)
                if "" in tests:
                    found.imported[file].add(int(line))
    return found, [file for file, blob in files.items() if known.get(file) != blob]


def measure(
    root: Path, scratch: Path, cache: Path, left_out: frozenset[str], until: float, job: int = 0, jobs: int = 1
) -> None:
    """Measure the files of tests that the map lacks, batch after batch, until that time (monotonic). Of `jobs`
    processes that begin together, this one takes each batch whose number is `job` modulo `jobs`."""
    cache.mkdir(parents=True, exist_ok=True)
    batches: list[list[str]] = [[]]
    missing = read(root, cache)[1]
    for file in missing:
        if sum((root / f).stat().st_size for f in batches[-1]) > BATCH_BYTES:
            batches.append([])
        batches[-1].append(file)
    files = test_files(root)
    for number, batch in enumerate(batches):
        if time.monotonic() > until or not batch:
            return
        if number % jobs != job:
            continue
        plugin = Measured(left_out)
        done = run(scratch, batch, plugin, exit_first=False)
        if not done.result:
            print(f"{', '.join(batch)}: not measured (status {done.status}, hung {done.hung})\n{done.output[-2000:]}")
            continue
        part = json.loads(done.result) | {"files": {file: files[file] for file in batch}}
        path = cache / f"part-{time.time_ns()}.json"
        path.with_suffix(".new").write_text(json.dumps(part))
        path.with_suffix(".new").rename(path)
        print(
            f"{number + 1} of {len(batches)} batches: {len(part['times'])} tests in {done.seconds:.0f} s, "
            f"{done.cpu_s:.0f} s of CPU; failed or skipped: {len(part['bad'])}",
            flush=True,
        )
