"""What the virtual clock gains: steps of a simulated engine at several `max_staleness`. Write results/in_flight.md.

    python benchmarks/in_flight.py [--steps 60]

The scheduler is ptf's own (ptf/rl/in_flight.py); engine and update are simulated, so the figures are of the schedule
and of no machine. 64 prompts × 8 responses, log-normal lengths (σ = 1, mean 1,000 tokens, at most 8,000). A decoding
step of the engine costs 10 ms and 20 µs for each response that is generated, a context 10 µs a token, also that of a
response which is continued; an update takes 15 % of a synchronous step. In the second case a token costs the same
whoever else is generated (a CPU). Prompts in flight are in units of the 64 of a step. The update runs beside one or two
slices, as where policy and engines have devices of their own; where they share them, the gain is that of the column
`shared devices`. Ends with status 1 if a bar is missed.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commands import options
from benchmarks.flow_runs import commit, results_page
from benchmarks.pages import table, today, write_page
from ptf.config.sections.rollout import RolloutConfig
from ptf.data.trajectory import Generation, Prompt, Reward, Trajectory
from ptf.rl.engines.protocol import Request, Sampling
from ptf.rl.flight_ledger import FlightLedger
from ptf.rl.in_flight import InFlight

PAGE = results_page("in_flight.md")
PICTURE = PAGE.with_suffix(".svg")
UPDATE = 0.15  # of a synchronous step
BARS = {1: 1.5, 2: 2.0, 4: 3.0}  # steps a second, of those of the synchronous loop
SLICES = (512, 1024, 1536)  # tokens of a slice; of those with the fewest waits the fastest is shown
WAITS = 0.05  # largest share of the time that the engine waits


@dataclass(frozen=True)
class Costs:
    """Seconds of a decoding step, of each response in it, and of a token of a context."""

    step: float
    response: float
    context: float


GPU, CPU = Costs(10e-3, 20e-6, 10e-6), Costs(0.0, 20e-6, 2e-6)


@dataclass(frozen=True)
class Work:
    """The responses of a step, and how long they are."""

    prompts: int = 64
    group: int = 8
    mean: float = 1000
    most: int = 8000

    @functools.cache  # noqa: B019 - a few works, which live as long as the process
    def length(self, seed: int) -> int:
        drawn = np.random.default_rng(seed).lognormal(np.log(self.mean) - 0.5, 1.0)
        return int(np.clip(drawn, 1, self.most))


USUAL = Work()


class Engine:
    """Counts the seconds that its batches would take."""

    def __init__(self, costs: Costs, work: Work = USUAL) -> None:
        self.costs, self.work, self.seconds, self.version = costs, work, 0.0, 0
        self.busy = self.places = 0  # decoded tokens; decoding steps × responses at the beginning of a slice

    def __call__(self, batches: list[list[Request]], version: int) -> list[list[Generation]]:
        return [self.batch(requests) for requests in batches]

    def batch(self, requests: list[Request]) -> list[Generation]:
        left = [min(self.work.length(r.seed) - r.offset, r.sampling.max_new_tokens) for r in requests]
        live = np.array(sorted(left))
        steps = int(live[-1])
        self.busy, self.places = self.busy + int(live.sum()), self.places + steps * self.work.prompts * self.work.group
        contexts = sum(r.offset for r in requests)
        self.seconds += steps * self.costs.step + live.sum() * self.costs.response + contexts * self.costs.context
        return [self.part(request, n) for request, n in zip(requests, left, strict=True)]

    def part(self, request: Request, n: int) -> Generation:
        ids, versions = np.zeros(n, np.int32), np.full(n, self.version, np.int32)
        ended = request.offset + n == self.work.length(request.seed)
        return Generation(request.context, ids, np.zeros(n, np.float32), versions, ended)


def player(work: Work) -> Callable[..., Any]:
    """Return what plays an episode of one response."""

    async def play(prompt: Prompt, _: int, i: int, ask: Callable[[Request], Any]) -> Trajectory:
        request = Request(np.zeros(0, np.int32), Sampling(work.most, 1.0, ()), prompt.index * work.group + i)
        return Trajectory(prompt, (await ask(request),), "", Reward(0.0))

    return play


Spans = list[tuple[str, int, float, float]]  # lane, step, and the seconds from and to which it computes


def measured(
    costs: Costs,
    k: int,
    steps: int,
    slice_tokens: int,
    update: float,
    update_slices: int,
    share: float = 0.5,
    spans: Spans | None = None,
) -> dict[str, float]:
    """Return seconds a step, and what happened in the steps after the first `steps // 4`, which `spans` is given."""
    engine, work = Engine(costs), USUAL
    prompts = (Prompt(np.zeros(0, np.int32), {}, "a", i) for i in range(10**9))
    in_flight = work.prompts + int(work.prompts * k * share)
    each_step = {"prompts_per_step": work.prompts, "group_size": work.group}
    clock = RolloutConfig(max_staleness=k, slice_tokens=slice_tokens, in_flight=in_flight, **each_step)
    flight = InFlight(
        clock, update_slices if k else 0, prompts.__next__, engine, player(work), 60.0, FlightLedger(None)
    )
    now = waited = start = busy = places = 0.0
    found: list[int] = []
    for step in range(steps):
        if step == steps // 4:  # the first steps begin with nothing in flight
            start, waited, found, busy, places = now, 0.0, [], engine.busy, engine.places
        began = now
        engine.version, engine.seconds = step, 0.0
        groups = flight.take_groups(step)
        now += engine.seconds
        taken = now
        found += [step - group.admitted for group in groups]
        engine.seconds = 0.0
        flight.beside_update(step, lambda: False)
        wait = max(0.0, update - engine.seconds)  # the engine waits for the weights, or they for the engine
        now += engine.seconds + wait
        waited += wait
        if spans is not None and step >= steps // 4:
            spans += [
                ("engine", step, began - start, taken - start),
                ("engine", step + 1, taken - start, taken - start + engine.seconds),
                ("policy", step, taken - start, taken - start + update),
            ]
    flight.close()
    seconds = now - start
    return {
        "seconds": seconds / (steps - steps // 4),
        "waits": waited / seconds,
        "occupancy": (engine.busy - busy) / (engine.places - places),
        "mean age": float(np.mean(found)),
        "largest age": max(found),
    }


def picture(steps: int = 40, shown: float = 420.0) -> str:
    """Return an SVG of when engine and policy compute, synchronous and at k = 2, over the same seconds."""
    synchronous = measured(GPU, 0, steps, USUAL.most, 0.0, 0)["seconds"]
    update = UPDATE * synchronous / (1 - UPDATE)
    lanes: list[tuple[str, Spans]] = []
    for title, k, tokens in (("max_staleness: 0", 0, USUAL.most), ("max_staleness: 2", 2, 1536)):
        spans: Spans = []
        measured(GPU, k, steps, tokens, update, 1, 0.75, spans)
        lanes += [(f"{title}, {lane}", [span for span in spans if span[0] == lane]) for lane in ("engine", "policy")]
    colours, left, width, height = ("#4c72b0", "#dd8452", "#55a868", "#c44e52"), 190, 700, 26
    parts = []
    for row, (title, spans) in enumerate(lanes):
        top = 10 + row * (height + 8) + (14 if row > 1 else 0)
        parts.append(f'<text x="{left - 8}" y="{top + 17}" text-anchor="end">{title}</text>')
        for _, step, start, end in spans:
            if end > start and start < shown:
                x, w = left + start / shown * width, (min(end, shown) - start) / shown * width
                parts.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{w:.1f}" height="{height}" '
                    f'fill="{colours[step % len(colours)]}"/>'
                )
    bottom = 10 + 4 * (height + 8) + 14
    parts += [
        f'<text x="{left + s / shown * width:.1f}" y="{bottom + 12}" text-anchor="middle">{s:.0f} s</text>'
        for s in np.arange(0, shown + 1, 60)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" height="{bottom + 22}" '
        f'font-family="sans-serif" font-size="12"><title>When engine and policy compute; one colour is one step</title>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


NAMES = (
    "k | tokens of a slice, slices of an update, prompts in flight | seconds a step | steps a second, of k = 0 | "
    "shared devices | engine waits | occupancy | mean age | largest age"
)


def by_staleness(costs: Costs, steps: int, bars: bool) -> tuple[str, list[str]]:
    """Return a table, and what missed its bar."""
    synchronous = measured(costs, 0, steps, USUAL.most, 0.0, 0)["seconds"]
    update = UPDATE * synchronous / (1 - UPDATE)
    base = measured(costs, 0, steps, USUAL.most, update, 0)
    rows, missed = [], []
    for k in (0, 1, 2, 4, 8):
        best, chosen = (base, "–") if k == 0 else (None, "")
        for tokens in SLICES if k else ():
            for update_slices, share in ((1, 0.5), (2, 0.5), (1, 0.75)):
                found = measured(costs, k, steps, tokens, update, update_slices, share)
                order = [(one["waits"] >= WAITS, one["seconds"]) for one in (found, best or found)]
                if best is None or order[0] < order[1]:
                    best, chosen = found, f"{tokens}, {update_slices}, {1 + k * share:g}"
        assert best is not None
        gain = base["seconds"] / best["seconds"]
        alone = (
            min(measured(costs, k, steps, tokens, update, 0)["seconds"] for tokens in SLICES) if k else base["seconds"]
        )
        gains = [f"{best['seconds']:.1f}", f"{gain:.2f}", f"{base['seconds'] / alone:.2f}", f"{best['waits']:.1%}"]
        shares = [f"{best['occupancy']:.0%}", f"{best['mean age']:.2f}", f"{best['largest age']:.0f}"]
        rows.append([k, chosen, *gains, *shares])
        if bars and k in BARS and gain < BARS[k]:
            missed.append(f"k = {k}: {gain:.2f} times, bar {BARS[k]}")
        if bars and k and best["waits"] >= WAITS:
            missed.append(f"k = {k}: the engine waits {best['waits']:.1%} of the time, bar {WAITS:.0%}")
    return table(NAMES, rows), missed


def main() -> int:
    steps = options(__doc__, steps=60).steps
    PICTURE.write_text(picture())
    gpu, missed = by_staleness(GPU, steps, True)
    cpu, _ = by_staleness(CPU, steps, False)
    about = (
        "# Rollouts in flight: the schedule, simulated\n\n"
        "Command: `python benchmarks/in_flight.py`  \n"
        f"Date: {today()}; commit {commit()}; no machine is measured\n\n"
        + (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].partition("Ends with")[0].rstrip()
        + "\n"
    )
    lines = ["", "## An engine that computes its responses together (a GPU)", "", gpu]
    lines += ["", "## An engine whose cost is proportional to its responses (a CPU)", "", cpu]
    return write_page(PAGE, about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
