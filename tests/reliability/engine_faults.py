"""Faults of an engine's process on Ray, one in each step, in a random order: `python -m tests.reliability.engine_faults
DIRECTORY SEED` prints a JSON line for each fault. The run must end with the answers,
rewards and weights of one in which nothing went wrong."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ptf.config import loads
from ptf.run import run
from tests.reliability.faults import found_of
from tests.tiny import arithmetic, online

FAULTS = {
    "raise": "out of order",
    "SIGKILL": "died while doing",
    "garbage": "log-probs that are not numbers",
    "SIGSTOP": "has not answered for",
    "hang": "did not finish",
}
DEADLINE_S = 25.0  # of a call, and of a process's start, which takes 6 s of an idle core


class Stamped:
    """What is printed, and when."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.lines, self.open = stream, list[tuple[float, str]](), ""

    def write(self, text: str) -> int:
        *whole, self.open = (self.open + text).split("\n")
        self.lines += [(time.time(), line) for line in whole]
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def job(directory: Path, seed: int) -> dict[str, Any]:
    raw = online(arithmetic(directory), directory, "tests.rl.plugs:varied")
    raw |= {"seed": seed, "algo": {"num_minibatches": 2}, "checkpoint": {"every": 100}}
    raw["track"] = {"tensorboard": False, "samples_every": 1, "sample_prompts": 4}
    raw["train"] |= {"steps": len(FAULTS) + 1, "deterministic": True}
    return raw


def played(directory: Path, seed: int) -> list[dict[str, Any]]:
    faults = np.random.default_rng(seed).permutation(list(FAULTS)).tolist()
    raw, place = job(directory, seed), directory / "faults"
    place.mkdir()
    run(loads(yaml.safe_dump(raw)), "whole")
    engine = {"use": "tests.rl.faulty:Engine", "args": {"place": str(place), "faults": faults}}
    raw |= {
        "rollout": {**raw["rollout"], "engine": engine},
        "compute": {"launcher": "ray", "device": "cpu", "threads": 1, "timeout_s": DEADLINE_S},
    }
    heard = sys.stdout = Stamped(sys.stdout)
    run(loads(yaml.safe_dump(raw)), "faulty")
    sys.stdout = heard.stream
    want, found = (found_of(directory / "runs" / name) for name in ("whole", "faulty"))
    apart = [key for key in ("answers", "weights") if want[key] != found[key]]
    rows = []
    for step, fault in enumerate(faults):
        mark = place / f"engine-{step}"
        wrong = [f"{', '.join(apart)} are not those of the run without faults"] if apart else []
        after = [
            when - mark.stat().st_mtime
            for when, line in heard.lines
            if mark.exists() and FAULTS[fault] in line and when >= mark.stat().st_mtime
        ]
        wrong += [] if mark.exists() else ["the fault did not happen"]
        wrong += [] if after else ["it was not named"]
        rows.append(
            {"fault": fault, "step": step + 1, "named_s": round(after[0], 2) if after else None, "wrong": wrong}
        )
    return rows


if __name__ == "__main__":
    for row in played(Path(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(row), flush=True)
