"""Running flows as a user would, and reading what they published."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that whoever imports this finds ptf, wherever it was started


def results_page(name: str) -> Path:
    """The file of a page in the results directory: `PTF_RESULTS`, or benchmarks/results."""
    directory = Path(os.environ.get("PTF_RESULTS") or ROOT / "benchmarks" / "results")
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def flow(name: str, config: str, overrides: Sequence[str], log: Path | None = None) -> float:
    """Run a flow to its end, its output on the console or in `log`; wall seconds.
    Raises SystemExit with the flow's status if it fails."""
    command = [sys.executable, f"flows/{name}_flow.py", "run", "--config", config]
    command += [word for o in overrides for word in ("--set", o)]
    print("$ " + " ".join(["python", *command[1:]]), flush=True)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("a")) if log else None
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=out, stderr=out)
    if done.returncode:
        sys.exit(f"{name} flow failed with status {done.returncode}" + (f"; see {log}" if log else ""))
    return time.perf_counter() - began


def published(output: str) -> dict[str, Any]:
    """The manifest of a job's newest published version, and where the run and the version lie."""
    root = ROOT / output / "published"
    version = json.loads((root / "latest.json").read_text())["version"]
    rows = [json.loads(line) for line in (ROOT / output / version / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((root / version / "manifest.json").read_text())
    return {
        "metrics": manifest["metrics"],
        "steps": len(rows),
        "step_s": median(r["step_s"] for r in rows),
        "train_s": sum(r["step_s"] for r in rows),
        "run": f"{output}/{version}",
        "published": f"{output}/published/{version}",
        "rows": rows,
    }


def cpu() -> str:
    names = [
        row.split(":", 1)[1].strip()
        for row in Path("/proc/cpuinfo").read_text().splitlines()
        if row.startswith("model name")
    ]
    return f"{len(names)} × {names[0]}" if names else platform.processor()


def commit() -> str:
    """The commit of this checkout, with a + where its Python files differ from it."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "no checkout") + (
        "+" if git("status", "--porcelain", "--", "*.py") else ""
    )
