"""Runs of every recipe are killed (SIGKILL) at random phases, file operations and moments, and continued. Each must end
as one that never stopped, to the bit, and leave nothing behind. Appends every trial to results/kills.jsonl; writes
results/kills.md and results/exactly_once.md of it.

    python benchmarks/kills.py [--minutes 8] [--recipes SFT …] [--anew] [--page]

Also runs with rollouts in flight (`rollout.max_staleness`: k) and their synchronous form, of responses and of episodes:
with one engine in the run's process; with two on a Ray of the run's own, whose workers are killed too; and by the wall
clock, which `ptf replay` has to repeat.

It goes on where the ledger ends, until each recipe has its share of kills or the minutes are over; the trials of a
recipe are drawn from its name and their number. `--anew` begins another ledger. `--page` only writes the pages. Ends
with status 1 if any trial of the ledger is wrong.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# of the processes that find rewards
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from benchmarks.commands import options  # noqa: E402
from benchmarks.flow_runs import commit, results_page  # noqa: E402
from benchmarks.pages import Row, head, keep, kept, table, today, told, write_page  # noqa: E402
from tests.reliability.jobs import JOBS, ON_POLICY, ONE_REPLICA  # noqa: E402
from tests.reliability.kills import Command, Trials, adopt_orphans, trials_of  # noqa: E402

RESULTS = results_page("kills.md")
LEDGER, ONCE = RESULTS.with_suffix(".jsonl"), RESULTS.with_name("exactly_once.md")
SHARES = {
    "SFT": 155,
    "DPO": 78,
    "DPO, reference found ahead": 78,
    "RM": 155,
    "KD": 78,
    "KD, teacher asked ahead": 78,
    "GRPO": 105,
    "PPO": 105,
    "OPD": 105,
    "GRPO, harness": 105,
    "GRPO, k = 1": 105,
    "GRPO, k = 4, episodes": 105,
    "GRPO, episodes": 20,
    "GRPO, k = 1, episodes": 20,
    "GRPO, k = 4": 20,
    "GRPO, k = 1, episodes, wall": 20,
    "GRPO, k = 4, episodes, wall": 20,
    **dict.fromkeys(ONE_REPLICA, 6),
}
OLD = list(SHARES)[:12]  # those whose phases are drawn alike
WANTED = {"SFT, DPO, RM and KD": 600, **{name: 100 if name in OLD else 5 for name in ON_POLICY}}
# of each, as a user's run
COMMANDS = {
    recipe: 5 if recipe.startswith(("DPO", "KD")) else 10 if recipe in OLD else 1 for recipe in JOBS
} | dict.fromkeys(ONE_REPLICA, 0)
# runs with rollouts in flight and their synchronous form: k, what is sampled, replicas, clock
IN_FLIGHT = {
    "GRPO": (0, "responses", 1, "–"),
    "GRPO, episodes": (0, "episodes", 1, "–"),
    "GRPO, harness": (0, "a harness", 1, "–"),
    "GRPO, k = 1": (1, "responses", 1, "virtual"),
    "GRPO, k = 1, episodes": (1, "episodes", 1, "virtual"),
    "GRPO, k = 4": (4, "responses", 1, "virtual"),
    "GRPO, k = 4, episodes": (4, "episodes", 1, "virtual"),
    "GRPO, two replicas": (0, "responses", 2, "–"),
    "GRPO, episodes, two replicas": (0, "episodes", 2, "–"),
    "GRPO, k = 1, two replicas": (1, "responses", 2, "virtual"),
    "GRPO, k = 1, episodes, two replicas": (1, "episodes", 2, "virtual"),
    "GRPO, k = 4, two replicas": (4, "responses", 2, "virtual"),
    "GRPO, k = 4, episodes, two replicas": (4, "episodes", 2, "virtual"),
    "GRPO, k = 1, episodes, wall": (1, "episodes", 1, "wall"),
    "GRPO, k = 4, episodes, wall": (4, "episodes", 1, "wall"),
}
# shares of trials with one trap, two, …, one an attempt; trials of a recipe, one after the other
TRAPS, CHUNK = (0.3, 0.25, 0.2, 0.15, 0.1), 25
LATER = 0.6  # an attempt that continues has less to do: its trap is drawn from so much of a run
SIGKILL = 9


def killed(found: Sequence[Row], recipe: str, way: str = "forked") -> list[Row]:
    """The kills by SIGKILL that were reached."""
    of = [row for row in found if (row["recipe"], row["way"]) == (recipe, way)]
    return [kill for row in of for kill in row["kills"] if kill.get("signal") == SIGKILL]


def due(found: Sequence[Row], recipes: Sequence[str]) -> tuple[str, str] | None:
    """The recipe that has least of its share, and the way that is next: forked while any recipe lacks such trials."""
    for way, shares in (("forked", SHARES), ("command", COMMANDS)):
        done = {recipe: len(killed(found, recipe, way)) / shares[recipe] for recipe in recipes if shares[recipe]}
        if not done:
            continue
        least = min(done, key=lambda recipe: done[recipe])
        if done[least] < 1:
            return least, way
    return None


def add(recipe: str, way: str, scratch: Path, until: float, code: str) -> bool:
    """Trials of one recipe, some more or until the time: forked ones, before which comes the first of the command line,
    or those of the command line alone. Whether all went well."""
    place = scratch / recipe
    place.mkdir()
    trials = trials_of(recipe, place)
    if recipe in ONE_REPLICA:
        # with k = 0 batches have other shapes, so rounding may differ; with k > 0 nothing may
        may_differ = IN_FLIGHT[recipe][0] == 0
        outcome = "same" if may_differ or not trials.otherwise else "different"
        about = {"recipe": recipe, "way": "one replica", "seed": 0, "commit": code, "date": today()}
        keep(LEDGER, about | {"otherwise": trials.otherwise, "outcome": outcome})
    first = ["command"] * (not killed(kept(LEDGER), recipe, "command"))
    ways = first + ["forked"] * CHUNK if way == "forked" else ["command"] * COMMANDS[recipe]
    well = True
    for each in ways:
        found = kept(LEDGER)
        if time.monotonic() > until:
            break
        if len(killed(found, recipe, each)) < {"forked": SHARES, "command": COMMANDS}[each][recipe]:
            well &= one(trials, each, sum((row["recipe"], row["way"]) == (recipe, each) for row in found), code)
    if well:
        shutil.rmtree(place)
    return well


def one(trials: Trials, way: str, seed: int, code: str) -> bool:
    """One trial, which is drawn by its seed, to the ledger. Whether it went well."""
    rng, began = Random(f"{trials.recipe}/{way}/{seed}"), time.monotonic()
    if way == "forked":
        hit = set() if trials.recipe in OLD else {phase_of(kill) for kill in killed(kept(LEDGER), trials.recipe)}
        number = rng.choices(range(1, len(TRAPS) + 1), TRAPS)[0]
        traps = [trials.drawn(rng, LATER if n else 1.0, hit) for n in range(number)]
        made = trials.trial(f"trial-{seed}", traps)
    else:
        made = Command(trials).trial(f"command-{seed}", rng)
    keep(LEDGER, {"recipe": trials.recipe, "way": way, "seed": seed, **made, "commit": code, "date": today()})
    points = ", then ".join(f"{kill['point']}{'' if kill['reached'] else ' (not reached)'}" for kill in made["kills"])
    print(f"{trials.recipe} {way} {seed}: {points}: {made['outcome']} ({time.monotonic() - began:.1f} s)", flush=True)
    return made["outcome"] == "same"


def phase_of(kill: Row) -> str:
    """The phase before or after which a run was killed; empty for another kill."""
    return kill["point"].split(" ", 2)[2] if kill["kind"] == "phase" and kill["reached"] else ""


def header(title: str, found: Sequence[Row]) -> str:
    commits = ", ".join(f"{name} ({count} trials)" for name, count in Counter(row["commit"] for row in found).items())
    command = "`make kills` (`python benchmarks/kills.py`)"
    return head(title, ", one core used", f"{told(found, 'date')}  \nCommit: {commits}", command)


KILLS = (
    "recipe | trials | SIGKILLs | before or after a phase | at a file operation | at a moment | of a worker (Ray) | "
    "inside a write (SIGXFSZ) | killed more than once | not reached | ended otherwise | left something"
)


def summary(name: str, of: Sequence[Row]) -> list[object]:
    """A row of the table of kills."""
    kills = [kill for row in of for kill in row["kills"]]
    by = Counter((kill["kind"], kill.get("signal")) for kill in kills if kill["reached"])
    missed = sum(not kill["reached"] for kill in kills)
    again = sum(sum(kill["reached"] for kill in row["kills"]) > 1 for row in of)
    phase, file, moment, worker = (by[kind, SIGKILL] for kind in ("phase", "file", "time", "worker"))
    different = sum("differs" in row["outcome"] or "ended with" in row["outcome"] for row in of)
    behind = sum("left: " in row["outcome"] or "missing: " in row["outcome"] for row in of)
    within = sum(count for (kind, _), count in by.items() if kind == "bytes")
    kinds = [f"**{phase + file + moment + worker}**", phase, file, moment, worker, within]
    return [name, len(of), *kinds, again, missed, f"**{different}**", f"**{behind}**"]


def write() -> int:
    """The pages, of the ledger. Returns how many of its trials are wrong."""
    everything = kept(LEDGER)
    found = [row for row in everything if row["way"] != "one replica"]
    forked, commands = ([row for row in found if row["way"] == way] for way in ("forked", "command"))
    wrong = [row for row in everything if row["outcome"] != "same"]
    groups = {"SFT, DPO, RM and KD": [r for r in JOBS if r not in ON_POLICY], **{name: [name] for name in ON_POLICY}}
    reached = {group: sum(len(killed(found, recipe)) for recipe in names) for group, names in groups.items()}
    short = [f"{group}: {reached[group]} of {wanted}" for group, wanted in WANTED.items() if reached[group] < wanted]
    lines = [summary(recipe, [row for row in forked if row["recipe"] == recipe]) for recipe in JOBS]
    lines.append(summary("together", forked))
    phases = Counter(phase for row in found for kill in row.get("kills", ()) if (phase := phase_of(kill)))
    steps = Counter(
        kill.get("rows") for row in forked for kill in row["kills"] if kill["reached"] and kill["kind"] == "time"
    )
    asked_for = (
        f"Fewer than were asked for: {'; '.join(short)}; the next `make kills` goes on."
        if short
        else "At least 600 SIGKILLs over SFT, DPO, RM and KD and 100 each over GRPO, PPO and OPD were asked for, and 5 "
        "for each further job."
    )
    as_commands = []
    for recipe in JOBS:
        if of := [row for row in commands if row["recipe"] == recipe]:
            otherwise = f"**{sum(row['outcome'] != 'same' for row in of)}**"
            as_commands.append([recipe, len(of), len(killed(commands, recipe, "command")), otherwise])
    lines = [
        table(KILLS, lines),
        f"\n{len(wrong)} of {len(found)} trials went wrong. {asked_for}\n",
        *(f"* {row['recipe']}, {row['way']} {row['seed']}: {row['outcome'][:300]}" for row in wrong),
        OF_TRIALS.format(phases=len(phases), steps=len(steps)),
        table("recipe | trials | killed | ended otherwise or left something", as_commands),
        asynchronous(forked, everything),
        CONTROLS,
        table("instant | kills", sorted(phases.items())),
        "\n</details>\n\nEvery trial, with where it was killed: [kills.jsonl](kills.jsonl).",
        "Answers of the online runs: [exactly_once.md](exactly_once.md).",
    ]
    write_page(RESULTS, header("Kills", found) + ABOUT.format(again=sum(TRAPS[1:])), lines)
    once(found)
    print(f"{len(found)} trials, {len(wrong)} wrong; {json.dumps(reached)}")
    return len(wrong)


ABOUT = """\
Tiny runs of every recipe (6 to 12 steps, a checkpoint every 2 or 3, held-out measurements) are killed, continued, and
in more than half of the trials ({again:.0%}) killed again while they continue. Each has to end as a run that was never
killed, to the bit: rows of metrics (clock fields aside), rollouts with their log-probs and advantages, every file of
the export, and every file of the last checkpoint (weights, optimizer, critic, the state of data, randomness and
prompts). The output must hold exactly the files of that run; no process, no file in shared memory and no temporary file
may be left.

"""
OF_TRIALS = """\
Attempts are processes forked from one that has imported what a run imports and never trained. A phase, drawn by its
name and then by its visit, is one of what a start, a step, a save, an export, a rollout, a sync and finding log-probs
ahead consist of; {phases} such instants were hit. A file operation is drawn by its number. A moment is uniform over a
run's time, and kills the whole process group ({steps} numbers of steps done were met). Inside a write, the kernel ends
the process at the first byte over a size, in whatever file and thread: nothing of the process runs after it either.
Traps that a run does not reach count for nothing.

As a user's run, `python -m ptf.cli train` in a process group that is killed a random while after a random row of
metrics, and the same command again; compared with the run of the forked process, so the two ways end with the same
bits:
"""
CONTROLS = """\
Negative controls (`tests/reliability`): a run that begins its data or its prompts anew, an optimizer that has seen
nothing, a directory that nobody sweeps and a process that outlives its parent are each reported.

<details><summary>Kills by phase</summary>
"""
OF_FLIGHT = """
## Rollouts in flight

GRPO with `rollout.max_staleness: k`, the native engine and 6 steps; of these jobs' trials, forked ones are counted. Two
replicas: on a Ray of the run's own, policy and engines in pools of their own, so that slices run beside updates; some
kills there are of a worker (the policy's or an engine's process), which the run has to survive (after the policy's, it
keeps the logs of that Ray). Before their trials the same job is run with one replica in its own process; the last
column says whether all that is compared has the same bits. With k = 0 there are no fixed batches: the responses of a
step are divided among the replicas, so batches have other shapes and the engine's log-probs, which are in metrics and
samples, may differ by rounding; these do not enter the loss in fp32 there. By the wall clock: environments take another
while each time, the killed run is continued, and `ptf replay` has to repeat it to the bit, with the same answers in
every step; the lines of `flight.jsonl` that were there when it was killed have to stay. Of the last checkpoint, what is
no decision yet may differ: whether an episode in flight has asked or ended that no slice has taken. Largest age: of a
group, in steps, when it was trained; it must not exceed k. Most steps of every job move its weights: a job where they
do not is refused.
"""
REFUSED = """
Refused by name, so not in the table: `rollout.harness` with `rollout.max_staleness` above 0 (a harness is here with
k = 0), and `rollout.replicas` above 1 with `compute.launcher: local`.
"""
PLACES = {
    (1, "virtual"): "one engine, in the run's process",
    (2, "virtual"): "two engines, on Ray",
    (1, "wall"): "by the wall clock",
}


def asynchronous(forked: Sequence[Row], found: Sequence[Row]) -> str:
    """The part of the page about rollouts in flight."""
    lines, hit = [], dict[tuple[int, str], Counter[str]]()
    for recipe, (k, sampled, replicas, clock) in IN_FLIGHT.items():
        of = [row for row in forked if row["recipe"] == recipe]
        if not of:
            continue
        kills = [kill for row in of for kill in row["kills"] if kill.get("signal") == SIGKILL]
        ages = [row["age"] for row in of if "age" in row]
        alike = [row["otherwise"] for row in found if (row["recipe"], row["way"]) == (recipe, "one replica")]
        if recipe not in ONE_REPLICA:
            bits = "–"
        else:
            others = sorted({name for names in alike for name in names})
            bits = "not asked" if not alike else f"not of {', '.join(others)}" if others else "**yes**"
        wrong = sum(row["outcome"] != "same" for row in of)
        of_workers = sum(kill["kind"] == "worker" for kill in kills)
        hits = Counter(phase for kill in kills if (phase := phase_of(kill)))
        hit.setdefault((replicas, clock if clock == "wall" else "virtual"), Counter()).update(hits)
        age = max(ages) if ages else 0 if k == 0 else "not kept"
        counts = [len(of), f"**{len(kills)}**", of_workers, len(hits), f"**{wrong}**"]
        lines.append([k, sampled, replicas, clock, *counts, age, bits])
    names = (
        "k | sampled | replicas | clock | trials | SIGKILLs | of a worker | instants hit | ended otherwise or left "
        "something | largest age | bits of one replica"
    )
    folded = [
        f"<details><summary>Instants hit, {PLACES[where]}</summary>\n\n"
        + table("instant | kills", sorted(hits.items()))
        + "\n\n</details>\n"
        for where, hits in hit.items()
    ]
    made = table(names, lines)
    return "\n".join([OF_FLIGHT, made, REFUSED, *folded])


ONCE_ABOUT = """\
The online trials of [kills.md](kills.md) with a ledger of their answers, kept by whoever kills the runs: every attempt
appends what was sampled, scored, trained and restored. What survives of an attempt are its steps before the one from
which the next attempt went on. An answer is known by its tokens and by the engine's log-probs of them, bit for bit.

"""
ONCE_AFTER = """
Sampled again: answers of steps that a kill took back, which the next attempt samples anew; they have to be the same
answers, with the same log-probs and rewards. Negative control (`tests/reliability`): where a resumed run begins its
prompts anew, answers are lost and others trained twice."""


def once(found: Sequence[Row]) -> None:
    """The page of the answers of online runs."""
    audited = [row for row in found if "answers" in row]
    columns = {
        "answers": "answers to train on",
        "sampled_again": "sampled again after a kill",
        "lost": "lost",
        "trained_twice": "trained twice",
        "not_in_the_history": "sampled, but not what the run without kills trained",
        "sampled_otherwise": "sampled otherwise than before",
        "scored_otherwise": "scored otherwise than before",
    }
    lines = []
    for name in (*ON_POLICY, "together"):
        of = [row for row in audited if name in (row["recipe"], "together")]
        counts = [sum(row["answers"][column] for row in of) for column in columns]
        reached = sum(kill["reached"] for row in of for kill in row["kills"])
        asked, again, *wrong = counts
        lines.append([name, len(of), reached, f"{asked:,}", f"{again:,}", *(f"**{count}**" for count in wrong)])
    about = header("Every answer is trained exactly once", audited) + ONCE_ABOUT
    write_page(ONCE, about, [table(["recipe", "trials", "kills", *columns.values()], lines), ONCE_AFTER])


def main() -> int:
    asked = options(__doc__, minutes=float("inf"), recipes=JOBS, anew=False, page=False)
    if asked.anew:
        LEDGER.unlink(missing_ok=True)
    adopt_orphans()
    until, code, shared = time.monotonic() + 60 * asked.minutes, commit(), Path("/dev/shm")
    # a killed process needs no disk
    scratch = Path(tempfile.mkdtemp(prefix="kills-", dir=shared if shared.is_dir() else None))
    well = True
    while not asked.page and well and time.monotonic() < until and (next_ := due(kept(LEDGER), asked.recipes)):
        well = add(*next_, scratch, until, code)
    if well:
        shutil.rmtree(scratch)
    else:
        print(f"what went wrong is in {scratch}", flush=True)
    return 1 if write() else 0


if __name__ == "__main__":
    sys.exit(main())
