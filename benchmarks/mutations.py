"""Small faults put into the package, and whether the tests see them. Keeps every trial in results/mutations.jsonl (a
mutation that stands there is not tried again) and writes results/mutations.md; exits 1 where fewer than 95 % of the
mutations that are not equivalent are caught.

    python benchmarks/mutations.py [--mutations 150] [--seed 0] [--minutes 60] [--again] [--junit REPORT] [--jobs 2]

A mutation changes one line of ptf/ (tests/reliability/mutants.py says how, and how it is drawn). The tests that run the
line are taken from a map that coverage.py makes once for each state of ptf/ and is kept in .coverage-map; they run on a
copy, the fastest first, until one fails or 60 s are over. A failure counts when the same tests pass without the change.
`--again` tries those anew that were not caught, after tests were added and committed. Tests that took longer than 5 s
in a report of `pytest --junit-xml` (`--junit`) are left out of the map. After `--minutes` no further mutation is begun,
and the next call goes on from there. `--jobs` is the number of processes. Needs root on Linux, and coverage.
"""

import ast
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if (ROOT.parent / "shared" / "data").is_dir():  # where the tests look for the real data
    os.environ.setdefault("PTF_DATA", str(ROOT.parent / "shared" / "data"))

from benchmarks.commands import options  # noqa: E402
from benchmarks.flow_runs import results_page  # noqa: E402
from benchmarks.pages import Row, here, keep, kept, table, told  # noqa: E402
from tests.reliability.isolated import Progress, Run, prepare, run  # noqa: E402
from tests.reliability.line_coverage import LineMap, git, measure, read  # noqa: E402
from tests.reliability.mutants import Drawing, Mutation  # noqa: E402

RESULTS = results_page("mutations.md")
LEDGER = RESULTS.with_suffix(".jsonl")
EQUIVALENT = Path(__file__).with_name("equivalent_mutations.json")
CACHE = ROOT / ".coverage-map"
TESTS_S = 60.0  # for the tests of one mutation
SLOW_S = 5.0  # tests that are left out of the map
HANGS = 5.0  # times what a test took before
STARTS_S = 40.0  # added for imports and fixtures of the first test on a machine with other work
WANTED = 0.95
CHOICES = {
    "line": "tests that run the line",
    "module": "tests that run the function or the module around it, or are named after the module",
    "directory": "tests of the directory that mirrors its package",
    "none": "no test in process",
}


def runs_at_import(mutation: Mutation) -> bool:
    """Whether a line is in no function's body: a table, a field, the default of a parameter."""
    tree = ast.parse((ROOT / mutation.file).read_bytes())
    bodies = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return not any(node.body[0].lineno <= mutation.line <= (node.end_lineno or 0) for node in bodies)


def chosen(mutation: Mutation, tests: LineMap) -> tuple[str, list[str]]:
    """How the tests of a mutation are chosen (a key of CHOICES), and the tests, the fastest first, for TESTS_S. A line
    that runs at the import is run by whichever test came first; so its tests are those of its module, too."""
    file, parts = mutation.file, mutation.file.removesuffix(".py").split("/")
    how, found = "line", tests.of(file, mutation.line, mutation.last_line)
    if not found or runs_at_import(mutation):
        names = {f"test_{name}" for name in parts[-2:] if name not in ("ptf", "__init__")}
        if "sections" in parts or parts[-1] == "config":  # keys: docs/config.md has their defaults
            names.add("test_reference")
        named = [test for test in tests.times if Path(test.partition("::")[0]).stem in names]
        how, found = "module", tests.of(file, *mutation.scope) | tests.of(file, 1, sys.maxsize) | set(named) | found
    if not found:
        how, found = "directory", tests.below(["/".join(["tests", *parts[1:-1], ""])] if len(parts) > 2 else [])
    order, total = list[str](), 0.0
    for test in sorted(found, key=lambda test: (tests.times[test], test)):
        total += tests.times[test]
        if order and total > TESTS_S:
            break
        order.append(test)
    return (how if order else "none"), order


def attempt(order: Sequence[str], tests: LineMap, change: tuple[str, bytes] | None) -> Run:
    """The tests, with or without the change."""
    return run(
        CACHE / "tree",
        sorted({test.partition("::")[0] for test in order}),
        Progress(order),
        change,
        limit_s=lambda test: HANGS * tests.times.get(test, TESTS_S) + STARTS_S,
        total_s=TESTS_S if change else float("inf"),
    )


def trial(mutation: Mutation, tests: LineMap, unsound: set[str]) -> Row:
    """What the tests say of a mutation, without those that are unsound. That the named test passes without the mutation
    is known of the map, and asked again by `controls`; where no test is named, that is tried here."""
    source = (ROOT / mutation.file).read_bytes()
    how, order = chosen(mutation, tests)
    order = [test for test in order if test not in unsound]
    if not order:
        found = {"chosen": "none", "tests": 0, "ran": 0, "late": False, "seconds": 0.0, "cpu_s": 0.0}
        return found | {"outcome": "no test"}
    done = attempt(order, tests, (mutation.file, mutation.applied(source)))
    found = {"chosen": how, "tests": len(order), "ran": len(done.began), "late": done.late}
    found |= {"seconds": round(done.seconds, 1), "cpu_s": round(done.cpu_s, 1)}
    if done.late or done.status == 0:
        return found | {"outcome": "survived"}
    if done.failed:
        return found | {"outcome": "caught", "by": done.failed[0]}
    until = done.hung or (done.began or ["import"])[-1]
    control = attempt(order[: order.index(until) + 1] if until in order else order[:1], tests, None)
    if control.status:
        return found | {"outcome": "survived", "note": f"{until} ends so without the mutation, too"}
    return found | {"outcome": "caught", "by": f"{until} ({'hangs' if done.hung else f'status {done.status}'})"}


def controls(rows: Sequence[Row], tests: LineMap) -> set[str]:
    """Those of the tests that caught mutations which fail without one, too."""
    names = sorted({row["by"] for row in rows if row["outcome"] == "caught"} & tests.times.keys())
    if not names:
        return set()
    done = run(CACHE / "tree", sorted({n.partition("::")[0] for n in names}), Progress(names), exit_first=False)
    print(f"{len(names)} tests without a mutation: status {done.status}, failed: {done.failed}", flush=True)
    return {*done.failed, *filter(None, [done.hung])}


def equivalents() -> dict[tuple[str, str, str], str]:
    """The reason why a mutation changes no behaviour, by file and by its line before and after."""
    return {(e["file"], e["before"], e["after"]): e["reason"] for e in json.loads(EQUIVALENT.read_text())}


def standing(rows: Sequence[Row]) -> list[Row]:
    """The last trial of each mutation, with `first`, the outcome of its first, and `reason` of an equivalent one."""
    reasons, found = equivalents(), dict[str, Row]()
    for row in rows:
        first = found[row["line_id"]]["first"] if row["line_id"] in found else row["outcome"]
        found[row["line_id"]] = row | {"first": first}
    for row in found.values():
        reason = reasons.get((row["file"], row["before"], row["after"]))
        if reason is not None and row["outcome"] != "caught":
            row |= {"outcome": "equivalent", "reason": reason}
    return list(found.values())


def code(text: str) -> str:
    """A cell of a table."""
    return "`" + text.replace("|", "\\|").replace("`", "'")[:110] + "`"


def share(rows: Sequence[Row]) -> float:
    """The share that is caught of those that are not equivalent."""
    counts = Counter(row["outcome"] for row in rows)
    return counts["caught"] / max(1, len(rows) - counts["equivalent"])


def page(trials: Sequence[Row], command: str) -> str:
    rows = standing(trials)
    counts, first = Counter(row["outcome"] for row in rows), Counter(row["first"] for row in rows)
    outcomes = ("caught", "survived", "no test", "equivalent")
    tests = told([row for row in trials if "tests_at" in row], "tests_at")
    seeds, hardware, dates, commits = (told(trials, key) for key in ("seed", "hardware", "date", "commit"))

    def counted(key: str, names: Sequence[str]) -> str:
        lines = []
        for name in names:
            of = [row for row in rows if row[key] == name]
            lines.append([CHOICES.get(name, name), len(of), *(sum(r["outcome"] == o for r in of) for o in outcomes)])
        return table([key, "drawn", *outcomes], lines) + "\n"

    def listed(outcome: str, *more: str) -> str:
        of = sorted((r for r in rows if r["outcome"] == outcome), key=lambda r: (r["file"], r["line"]))
        cells = [
            [f"{r['file']}:{r['line']}", r["operator"], code(r["before"]), code(r["after"]), *(r[m] for m in more)]
            for r in of
        ]
        return (table(["line", "operator", "before", "after", *more], cells) if cells else "None.") + "\n"

    return (
        "# Mutations\n\n"
        f"Command: `{command}` (`make mutations`)  \nHardware: {hardware}, other work on it; "
        f"{sum(row['cpu_s'] for row in trials):.0f} s of CPU in {sum(row['seconds'] for row in trials) / 60:.0f} "
        "minutes, without the map  \n"
        f"Date: {dates}; ptf/ at {commits}; tests at the same commits or, where the ledger says so, at {tests}; seed "
        f"{seeds}  \nEach trial: [mutations.jsonl](mutations.jsonl)\n\n"
        f"{'**Only ' + str(len(rows)) + ' of 150 mutations are tried so far.** ' if len(rows) < 150 else ''}"
        f"**Of {len(rows)} drawn mutations {counts['caught']} are caught, {counts['equivalent']} are equivalent, "
        f"{counts['survived']} survive and {counts['no test']} have no test\nin process: {share(rows):.1%} of those "
        f"that are not equivalent are caught** (the bar is {WANTED:.0%}). At their first trial {first['caught']} were "
        "caught.\n\n"
        "A mutation changes one line of `ptf/`: a comparison, an arithmetic or boolean operator, a constant, "
        "a condition negated, a statement\ndeleted, `None` returned, a bound of a slice, `min` and `max`, a default. "
        "Docstrings, annotations, messages, f-strings and\n`__all__` are left alone. The line is drawn uniformly among "
        "all lines to which an operator applies, by a\ndigest of its file and text, then the operator: a trial counts "
        "as long as its line stays in the package. The fastest tests run\nfirst, until one fails or "
        f"{TESTS_S:g} s are over, on a copy in namespaces of its own. Every test that failed passes without the "
        "mutation. A test\nthat hangs counts as one that fails. The map of lines leaves out tests that need Ray, "
        "flows, a cluster or a GPU, the main job, and tests\nthat take longer than "
        f"{SLOW_S:g} s, so what only these would catch is counted as not caught.\n\n"
        f"{counted('operator', sorted({row['operator'] for row in rows}))}\n"
        f"{counted('chosen', list(CHOICES))}\n"
        f"## Survivors\n\n{listed('survived', 'ran')}\n"
        f"## No test in process\n\nWhat would cover them: tests under Ray, flows, vLLM or a cluster.\n\n"
        f"{listed('no test')}\n"
        f"## Equivalent\n\n{listed('equivalent', 'reason')}"
    )


def write(drawn: Mapping[str, Mutation]) -> int:
    """Write the page of what is drawn from ptf/ as it is; the exit status."""
    trials, sound = [row for row in kept(LEDGER) if is_drawn(row, drawn)], 0.0
    if trials:
        RESULTS.write_text(page(trials, "python benchmarks/mutations.py"))
        sound = share(standing(trials))
        print(f"wrote {RESULTS.relative_to(ROOT)}; {sound:.1%} caught")
    return int(sound < WANTED)


def slow(report: str) -> frozenset[str]:
    """Tests that took longer than SLOW_S in a report of pytest."""
    if not report:
        return frozenset()
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return frozenset(
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        for case in cases
        if float(case.attrib["time"]) > SLOW_S
    )


def play(mutations: Mapping[str, Mutation], seed: int, tests: LineMap, unsound: set[str], until: float) -> None:
    """Try these mutations until that time (monotonic), and add the trials to the ledger."""
    about = {**here(), "tests_at": git(ROOT, "log", "-1", "--format=%h", "--", "tests")}
    for line_id, mutation in mutations.items():
        if time.monotonic() > until:
            break
        before, after = mutation.lines((ROOT / mutation.file).read_bytes())
        row = {"seed": seed, "line_id": line_id, "file": mutation.file, "line": mutation.line}
        row |= {"operator": mutation.operator, "before": before, "after": after}
        row |= trial(mutation, tests, unsound) | about
        keep(LEDGER, row)
        print(json.dumps(row), flush=True)


def in_processes(jobs: int, work: Callable[[int], object]) -> None:
    """Call `work` with 0, 1, … in as many processes, and wait for all. Raises SystemExit where one fails."""
    if jobs == 1:
        work(0)
        return
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(job)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise SystemExit("a process of --jobs failed")


def is_drawn(row: Row, drawn: Mapping[str, Mutation]) -> bool:
    """Whether the mutation of a trial is among these."""
    mutation = drawn.get(row["line_id"])
    return mutation is not None and mutation.lines((ROOT / mutation.file).read_bytes()) == (row["before"], row["after"])


def main() -> int:
    asked = options(
        __doc__,
        mutations=150,
        seed=0,
        minutes=float("inf"),
        again=(False, "those that were not caught"),
        junit=("", "a report of pytest: its slow tests are left out of the map"),
        jobs=(1, "processes"),
        page=(False, "write the page alone"),
    )
    drawn = Drawing(ROOT, "ptf").drawn(asked.seed, asked.mutations)
    if asked.page:
        return write(drawn)
    until = time.monotonic() + 60 * asked.minutes
    prepare(ROOT, CACHE / "tree")
    cache = CACHE / git(ROOT, "rev-parse", "HEAD:ptf")
    in_processes(
        asked.jobs,
        lambda job: measure(ROOT, CACHE / "tree", cache, slow(asked.junit), until, job, asked.jobs),
    )
    tests, _ = read(ROOT, cache)
    known = {row["line_id"]: row["outcome"] for row in standing([row for row in kept(LEDGER) if is_drawn(row, drawn)])}
    repeated = ("survived", "no test") if asked.again else ()
    due = [line_id for line_id in drawn if known.get(line_id, "new") in ("new", *repeated)]

    def attempts(line_ids: Sequence[str], unsound: set[str]) -> None:
        play({line_id: drawn[line_id] for line_id in line_ids}, asked.seed, tests, unsound, until)

    before = len(kept(LEDGER))
    in_processes(asked.jobs, lambda job: attempts(due[job :: asked.jobs], set()))
    tried = kept(LEDGER)[before:]
    unsound = controls(tried, tests)
    if unsound:
        attempts([row["line_id"] for row in tried if row.get("by") in unsound], unsound)
    return write(drawn)


if __name__ == "__main__":
    sys.exit(main())
