"""One fault in a tiny GRPO or PPO run: whether it became a number, how soon it was named, and whether the run's results
are right.

A run without a fault gives the right reward of every answer. A fault that passes must leave the bits of that run. With
one that lasts, the answers without a reward must be those of the question that failed, and all others must have the
rewards of the run without a fault.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import ptf.rl.online_run  # noqa: F401  here, and not in every fork
from ptf.compute.tracking import is_clock, read_metrics
from ptf.config import loads
from ptf.run import run
from tests.reliability import fallible_engine  # noqa: F401
from tests.reliability.fallible import CALLS, ENDS, REWARDS, TURNS
from tests.tiny import arithmetic, online

STEPS, PROMPTS, GROUP, TURNS_EACH = 4, 4, 4, 2
DEADLINE_S, NAMED_S, ENDS_S = 2.0, 10.0, 180.0
SAID = {
    "raise": "out of order",
    "exit": "process died",
    "interrupt": "process died",
    "hang": "longer than",
    "SIGSTOP": "longer than",
    "SIGKILL": "process died",
    "SIGSEGV": "process died",
    "fork": "instead of",
    "noise": "cannot be read",
    "half": "longer than",
    "deaf": "process died",
    "NaN": "nan",
    "infinity": "inf",
    "huge": "1e+308",
    "minus huge": "-1e+308",
    "10**400": "OverflowError",
    "None": "None",
    "a text": "0.5",
    "a list": "list",
    "a dict": "dict",
    "a complex number": "complex",
    "no number": "no number",
    "no turn": "not a ptf.rl.environments.protocol.StepResult",
    "too few messages": "no message",
    "no data": "cannot be sent",
    "no messages": "messages of a step",
}
NOT_ASKED_AGAIN = ("too few messages",)  # it is an answer, after which the conversation cannot go on
REPEATED = "rewards_retried"  # in metrics: differs where a fault passed
PLACES = {"reward": [*ENDS, *REWARDS], "environment": [*ENDS, *REWARDS, *TURNS], "engine": CALLS}
SAID_OF_ENGINES = {
    "raise": "out of order",
    "out of memory": "no room",
    "too few": "responses to",
    "too many": "responses to",
    "None": "NoneType",
}


@dataclass(frozen=True)
class Trial:
    recipe: str  # grpo, ppo
    place: str  # reward, environment, engine
    fault: str
    at: int  # the question at which it happens
    lasts: bool  # it comes again when the same is asked again


def drawn(seed: int) -> Trial:
    """Of a seed: every fault of every place comes before any comes twice."""
    every = [(place, fault) for place, faults in PLACES.items() for fault in faults]
    rng = np.random.default_rng([seed // len(every), 7])
    place, fault = every[int(rng.permutation(len(every))[seed % len(every)])]
    rng = np.random.default_rng(seed)
    asked = {
        "reward": STEPS * PROMPTS * GROUP,
        "environment": STEPS * PROMPTS * GROUP * (1 + TURNS_EACH),
        "engine": STEPS,
    }[place]
    lasts = place != "engine" and bool(rng.integers(2))
    return Trial(["grpo", "ppo"][int(rng.integers(2))], place, fault, int(rng.integers(1, asked + 1)), lasts)


def job(directory: Path, trial: Trial, place: Path) -> dict[str, Any]:
    limits = {"reward_timeout_s": DEADLINE_S, "max_no_result_share": 0.5}
    raw = online(arithmetic(directory), directory, "", prompts_per_step=PROMPTS, group_size=GROUP, **limits)
    raw |= {"recipe": trial.recipe, "algo": {"num_minibatches": 2}, "checkpoint": {"every": 100}}
    raw["track"] = {"tensorboard": False, "samples_every": 1, "sample_prompts": PROMPTS}
    raw["train"]["steps"] = STEPS
    args = {"place": str(place), "fault": trial.fault, "at": trial.at, "lasts": trial.lasts}
    never = {**args, "at": 10**9}
    if trial.place == "environment":
        raw["rollout"] |= {"environment": {"use": "tests.reliability.fallible:Environment", "args": args}}
    else:
        raw["rollout"]["reward"] = {
            "use": "tests.reliability.fallible:reward",
            "args": args if trial.place == "reward" else never,
        }
    if trial.place == "engine":
        raw["rollout"]["engine"] = {
            "use": "tests.reliability.fallible_engine:Engine",
            "args": {"place": str(place), "fault": trial.fault, "at": trial.at},
        }
    return raw


def attempt(raw: Mapping[str, Any], run_name: str) -> tuple[int, list[tuple[float, str]]]:
    """Run it in a fork, and how that ended (0; 1 for an error that its last line names; minus a signal), with the
    moment that each line was said at."""
    heard, says = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            for number in (1, 2):
                os.dup2(says, number)
            os.close(heard)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # whatever it was
            run(loads(yaml.safe_dump(dict(raw))), run_name)
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    os.close(says)
    lines, begun, ends = list[tuple[float, str]](), b"", time.monotonic() + ENDS_S
    with open(heard, "rb", buffering=0) as stream:
        while time.monotonic() < ends:
            if select.select([stream], [], [], 0.2)[0]:
                data = stream.read(65536)
                if not data:
                    break
                *whole, begun = (begun + data).split(b"\n")
                lines += [(time.time(), line.decode(errors="replace")) for line in whole]
            elif _gone(pid):  # what it left may hold the pipe open
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lines


def _gone(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def found_of(directory: Path) -> dict[str, Any]:
    """What a run found, by step: its metrics but clocks, and its answers with their rewards. Its weights."""
    rows = read_metrics(directory / "metrics.jsonl")
    metrics = {row["step"]: {k: v for k, v in row.items() if not is_clock(k) and k != REPEATED} for row in rows}
    answers: dict[int, list[dict[str, Any]]] = {}
    for row in read_metrics(directory / "samples.jsonl"):
        answers.setdefault(row["step"], []).append(row)
    weights = directory / "model" / "model.safetensors"
    return {"metrics": metrics, "answers": answers, "weights": weights.read_bytes() if weights.exists() else None}


class Trials:
    """In a directory of its own, with the runs in which nothing goes wrong."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.whole = directory, dict[tuple[str, str], dict[str, Any]]()

    def undisturbed(self, trial: Trial) -> dict[str, Any]:
        key = (trial.recipe, "environment" if trial.place == "environment" else "reward")
        if key not in self.whole:
            status, lines = attempt(
                job(self.directory, Trial(*key, "raise", 10**9, False), self.directory), "-".join(key)
            )
            assert status == 0, lines[-20:]
            self.whole[key] = found_of(self.directory / "runs" / "-".join(key))
        return self.whole[key]

    def play(self, trial: Trial, name: str) -> dict[str, Any]:
        """The outcome; `wrong` is empty where all is right."""
        want, place = self.undisturbed(trial), self.directory / name
        place.mkdir()
        status, lines = attempt(job(self.directory, trial, place), name)
        made = self.directory / "runs" / name
        found, fired = found_of(made), place / "fired"
        happened = [json.loads(line) for line in fired.read_text().splitlines()] if fired.exists() else []
        wrong = [] if happened else ["the fault did not happen"]
        said = self._said(trial, happened) if happened else ""
        after = [
            when - happened[0]["time"]
            for when, line in lines
            if happened and said in line and when >= happened[0]["time"] - 0.05
        ]
        differs = self._differs(trial, status, want, found, happened)
        # nobody was asked after it whom the second answer could have misled
        unseen = trial.fault == "fork" and not after and not differs
        if not unseen and (not after or after[0] > NAMED_S):
            wrong.append(
                f"{said!r} was said after {after[0]:.1f} s"
                if after
                else f"{said!r} was not said: {[line for _, line in lines][-5:]}"
            )
        if status < 0:
            wrong.append(f"the run ended with {status}")
        wrong += differs
        outcome = {
            **asdict(trial),
            "status": status,
            "named_s": round(after[0], 2) if after else None,
            "outcome": self._ended(status, found, lines),
            "wrong": wrong,
        }
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(place)
        return outcome

    def _said(self, trial: Trial, happened: list[dict[str, Any]]) -> str:
        """An environment that begins with garbage is told so in other words."""
        if trial.place == "engine":
            return SAID_OF_ENGINES.get(trial.fault, "the rollout engine")
        begins = trial.place == "environment" and len(json.loads(happened[0]["question"])) == 2
        if trial.fault in REWARDS and trial.place == "environment":
            return "environment" if begins else "the reward of a step is"
        return "environment" if begins and trial.fault not in ENDS else SAID[trial.fault]

    def _ended(self, status: int, found: dict[str, Any], lines: list[tuple[float, str]]) -> str:
        if status:
            return "stopped: " + next((line for _, line in reversed(lines) if line.strip()), "")[:160]
        without = sum(row["reward"] is None for rows in found["answers"].values() for row in rows)
        return f"{without} answers without a result" if without else "asked again"

    def _differs(
        self, trial: Trial, status: int, want: dict[str, Any], found: dict[str, Any], happened: list[dict[str, Any]]
    ) -> list[str]:
        """Every answer has the reward that it has undisturbed, or none; and where nothing lasted all is as it would
        have been."""
        wrong, questions = [], {entry["question"] for entry in happened}
        apart = next((step for step in want["answers"] if found["answers"].get(step) != want["answers"][step]), None)
        if apart is None:
            same = found["metrics"] == want["metrics"] and found["weights"] == want["weights"]
            return [] if same else ["answers are the same, metrics or weights are not"]
        if trial.place == "engine":
            made = apart in found["answers"] or apart in found["metrics"] or not status
            return ["steps after an engine's fault were made"] * made
        if not trial.lasts and trial.fault not in NOT_ASKED_AGAIN:
            return [f"step {apart} differs though the fault passed"]
        for a, b in zip(found["answers"].get(apart, []), want["answers"][apart], strict=False):
            if a["reward"] is not None and a["reward"] != b["reward"]:
                wrong.append(f"step {apart}: the reward {a['reward']} in place of {b['reward']}")
            elif (
                a["reward"] is None
                and trial.place == "reward"
                and json.dumps([a["row"]["answer"], a["response"]], sort_keys=True) not in questions
            ):
                wrong.append(f"step {apart}: {a['response']!r} has no result though nothing went wrong with it")
        if apart in found["answers"] and len(found["answers"][apart]) != len(want["answers"][apart]):
            wrong.append(f"step {apart}: {len(found['answers'][apart])} answers")
        return wrong
