"""A ledger of every answer of an online run through all its kills: that each was trained exactly once,
and none lost or sampled otherwise.

It is kept beside the run, by whoever kills it. Each attempt appends what was sampled, scored, trained and restored;
what survives of an attempt are its steps before the one from which the next attempt went on. An answer is known by its
tokens and by the engine's log-probs of them.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ptf.data.document import Document
from ptf.data.trajectory import Group, Reward


def known_by(sample: Document) -> str:
    return hashlib.sha256(sample.tokens.tobytes() + sample.token_columns["rollout_logprobs"].tobytes()).hexdigest()[:24]


def keep(ledger: Path, attempt: int) -> None:
    """In the process that trains: append to the ledger, a line an event. A line is one write,
    so a kill leaves whole ones."""
    from ptf.data.trajectory import samples_of
    from ptf.rl import controller, in_flight, rollouts
    from tests.reliability.traps import groups

    file = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    run, take_groups = controller.Controller.run, in_flight.InFlight.take_groups
    finish = rollouts.Rollouts.finish
    at = [0]

    def note(event: str, step: int, **more: Any) -> None:
        os.write(file, (json.dumps({"attempt": attempt, "event": event, "step": step, **more}) + "\n").encode())

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(self: Any, method: str, *args: Any, **options: Any) -> Any:
            done = call(self, method, *args, **options)
            if method == "rollout" and args[2].startswith("step "):  # not those of an evaluation
                at[0] = args[1]
                answers = [known_by(sample) for group in done for t in group for sample in samples_of(t)]
                note("sampled", args[1], answers=answers)
            if method == "update" and self.spec.name == "policy":
                answers = [known_by(sample) for units in args[0] for unit in units for sample in unit]
                note("trained", args[1], answers=answers)
            return done

        return calling

    def taking(self: in_flight.InFlight, step: int, *args: Any) -> Any:
        """Of what is in flight, what is taken in a step."""
        taken, at[0] = take_groups(self, step, *args), step
        note(
            "sampled", step, answers=[known_by(s) for group in taken for t in group.trajectories for s in samples_of(t)]
        )
        return taken

    def finishing(self: rollouts.Rollouts, *args: Any) -> list[Group]:
        scored = finish(self, *args)
        values = [t.outcome.value if isinstance(t.outcome, Reward) else None for group in scored for t in group]
        known = [known_by(s) for group in scored for t in group for s in samples_of(t)]
        note("scored", at[0], answers=[list(pair) for pair in zip(known, values, strict=True)])
        return scored

    def beginning(self: controller.Controller) -> None:
        note("restored", self.step)
        run(self)

    for group in groups():
        group.call = noting(group.call)
    rollouts.Rollouts.finish, controller.Controller.run = finishing, beginning
    in_flight.InFlight.take_groups = taking


def read(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def surviving(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of the model that there is at the end: of each attempt,
    the steps before those that a later one made again."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "restored":
            found = [one for one in found if one["step"] < event["step"]]
        else:
            found.append(event)
    return found


def audit(events: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Counts over a run; `whole` is the ledger of the same run without kills.
    All but `answers` and `sampled_again` must be 0."""
    kept = surviving(events)
    wanted = {(one["event"], one["step"]): one["answers"] for one in whole if "answers" in one}
    lost = twice = other = 0
    for step in range(steps):
        sampled, trained = (
            Counter(name for one in kept if (one["event"], one["step"]) == (event, step) for name in one["answers"])
            for event in ("sampled", "trained")
        )
        due = Counter(wanted["sampled", step])
        lost += (due - trained).total()
        twice += (trained - due).total()
        other += (sampled - due).total() + (due - sampled).total()
    seen: set[tuple[str, int]] = set()
    again = resampled = rescored = 0
    for one in events:
        if one["event"] not in ("sampled", "scored"):
            continue
        key = one["event"], one["step"]
        different = sum(a != b for a, b in zip(one["answers"], wanted[key], strict=True))
        if one["event"] == "scored":
            rescored += different
        else:
            resampled += different
            again += len(one["answers"]) if key in seen else 0
        seen.add(key)
    answers = sum(len(answers) for (event, _), answers in wanted.items() if event == "sampled")
    return {
        "answers": answers,
        "sampled_again": again,
        "lost": lost,
        "trained_twice": twice,
        "not_in_the_history": other,
        "sampled_otherwise": resampled,
        "scored_otherwise": rescored,
    }


def wrong(found: dict[str, Any]) -> list[str]:
    return [
        f"{count} answers {name}" for name, count in found.items() if name not in ("answers", "sampled_again") and count
    ]
