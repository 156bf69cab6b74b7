"""Do agents, tasks and games of configs/agents/ learn, each from several seeds? Write
benchmarks/results/learning_agents.md.

    python benchmarks/learning_agents.py [--seeds 5] [--agents calculator smolagents …] [--jobs 2]

Each is trained by its config, from the model that the `_sft` config makes where there is one, otherwise from random
weights. `smolagents` needs `make .venv-smolagents/ready`, `reasoning_gym` and `textarena` the extras of these names. In
the controls of the first two, what is right does not depend on the prompt; in those of the others, the rewards of a
step are permuted (benchmarks/shuffled_rewards.py), and the metric is of the true ones. Runs are kept in
runs/learning_agents: the command goes on where it was stopped. What they reached is added to
results/learning_agents.jsonl, from which the page is made.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from commands import ROOT, options
from flow_runs import commit, results_page
from pages import Row, head, keep, kept, table, today, write_page

from ptf.compute.tracking import read_metrics

PAGE = results_page("learning_agents.md")
LEDGER = PAGE.with_suffix(".jsonl")
PLACE = ROOT / "runs" / "learning_agents"
WINDOW = 10  # steps of a mean
WRONG_TASK = ("rollout.harness.agent.args.shuffled=true",)
PERMUTED = ("recipe.use=benchmarks.shuffled_rewards:ShuffledRewards",)


@dataclass(frozen=True)
class Agent:
    """A config of configs/agents/, and what its runs must reach: the mean of a metric over WINDOW steps."""

    name: str
    about: str
    goal: float
    limit: float  # the control's mean never exceeds it
    steps: int
    control: tuple[str, ...] = PERMUTED
    control_steps: int = 80
    metric: str = "reward"
    seeds: int = 5
    sft: bool = False  # it starts from the model of NAME_sft.yaml


AGENTS = [
    Agent(
        "calculator",
        "an agent in OpenAI's SDK, which streams and has a tool, through the endpoint",
        0.95,
        0.15,
        100,
        WRONG_TASK,
        sft=True,
    ),
    Agent(
        "smolagents",
        "`ToolCallingAgent` of smolagents in an interpreter of its own, through the endpoint",
        0.95,
        0.15,
        100,
        WRONG_TASK,
        seeds=2,
        sft=True,
    ),
    Agent(
        "reasoning_gym", "words spelled backward (`spell_backward`), scored by reasoning-gym", 0.85, 0.7, 150, sft=True
    ),
    Agent("gymnasium", "a walk over a frozen lake (`FrozenLake-v1` of gymnasium)", 0.95, 0.7, 60),
    Agent("textarena", "a number from 1 to 7 is guessed within three turns (`GuessTheNumber-v0`)", 0.9, 0.85, 100),
    Agent(
        "nim",
        "self-play: share of the moves that win against best play",
        0.9,
        0.45,
        250,
        control_steps=200,
        metric="episode/best_moves",
    ),
]


def train(config: str, name: str, steps: int | None, *changes: str, stop: Agent | None = None) -> Path:
    """Run a job as a user does, unless it is done, and stop it once it reaches the goal of `stop`; return its run's
    directory."""
    run = PLACE / config / name
    changes = (*changes, f"output={PLACE / config}", *([f"train.steps={steps}"] if steps else []))
    command = [sys.executable, "-m", "ptf.cli", "train", f"configs/agents/{config}.yaml", "--run-name", name]
    if (run / "model" / "model.safetensors").exists() or (stop and reached(run, stop)):
        return run
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = run.with_suffix(".commit")
    began.parent.mkdir(parents=True, exist_ok=True)
    if not began.exists():
        began.write_text(f"{commit()} {today()}\n")
    process = subprocess.Popen(
        [*command, *(f"--set={change}" for change in changes)], cwd=ROOT, env=environment, stdout=sys.stderr
    )
    while process.poll() is None:
        time.sleep(2)
        if stop and reached(run, stop):
            process.terminate()
            process.wait()
    if not (stop and reached(run, stop)) and not (run / "model" / "model.safetensors").exists():
        raise SystemExit(f"{config} {name} ended with status {process.returncode}; the same command continues it")
    return run


def means(run: Path, metric: str) -> np.ndarray:
    """Return the mean of a metric over each step and the nine before it."""
    file = run / "metrics.jsonl"
    values = [row[metric] for row in read_metrics(file) if metric in row] if file.exists() else []
    return np.convolve(values, np.ones(WINDOW) / WINDOW, "valid") if len(values) >= WINDOW else np.zeros(0)


def reached(run: Path, agent: Agent) -> int | None:
    """Return the step at which a run reached the goal."""
    at = np.flatnonzero(means(run, agent.metric) >= agent.goal)
    return int(at[0]) + WINDOW if len(at) else None


def played(agent: Agent, seed: int | None) -> Row:
    """Train from a seed, or the control, unless it is done; return what the run reached."""
    start = (f"model.path={train(f'{agent.name}_sft', 'start', None) / 'model'}",) if agent.sft else ()
    if seed is None:
        name, run = "control", train(agent.name, "control", agent.control_steps, *agent.control, *start)
    else:
        name = f"seed {seed}"
        run = train(agent.name, f"seed{seed}", agent.steps, *start, f"seed={seed}", stop=agent)
    values = means(run, agent.metric)
    began = run.with_suffix(".commit").read_text().split()
    found = {"first": round(float(values[0]), 3), "highest": round(float(values.max()), 3)}
    found |= {"reached": reached(run, agent), "commit": began[0], "date": began[1]}
    return {"agent": agent.name, "run": name, **found}


def is_right(agent: Agent, run: Row) -> bool:
    """Return whether a run has met its bar."""
    return run["highest"] < agent.limit if run["run"] == "control" else run["reached"] is not None


def line(agent: Agent, run: Row) -> list[str]:
    if run["run"] == "control":
        bar, steps = f"stays below {agent.limit}", agent.control_steps
        found = f"{run['highest']:.2f} at most"
    else:
        bar, steps = f"reaches {agent.goal}", agent.steps
        found = f"at step {run['reached']}" if run["reached"] else f"{run['highest']:.2f} at most"
    first = f"{run['first']:.2f}" if run["first"] is not None else ""
    found += f" ({run['note']})" if "note" in run else ""
    return [agent.name, run["run"], f"`{agent.metric}` {bar}, {steps} steps", first, found, run["commit"]]


def write() -> int:
    """Write the page of all runs of the ledger, of each the last; return 1 if one missed its bar or is not there."""
    last = {(row["agent"], row["run"]): row for row in kept(LEDGER)}
    named = {agent.name: agent for agent in AGENTS}
    shown = sorted(
        last.values(), key=lambda row: (list(named).index(row["agent"]), row["run"] == "control", row["run"])
    )
    lines = [line(named[row["agent"]], row) for row in shown]
    missed = [f"{row['agent']}, {row['run']}" for row in shown if not is_right(named[row["agent"]], row)]
    wanted = [(agent.name, run) for agent in AGENTS for run in (*(f"seed {i}" for i in range(agent.seeds)), "control")]
    absent = [f"{name}, {run}" for name, run in wanted if (name, run) not in last]
    command = "`python benchmarks/learning_agents.py` (`make learning-agents`)"
    date = f"{max(row['date'] for row in shown)}; commits in the table; each run: [{LEDGER.name}]({LEDGER.name})"
    about = (
        head("Agents, tasks and games learn", ", one thread a run, no GPU", date, command)
        + "".join(f"* `{agent.name}`: {agent.about}.\n" for agent in AGENTS)
        + f"\nEach is trained by `configs/agents/NAME.yaml`, from the model of `NAME_sft.yaml` where there is one, "
        f"otherwise from random weights. Values are means over {WINDOW} steps of training, the first of the first "
        f"{WINDOW}; a run ends where it reaches its bar. In the controls of `calculator` and `smolagents` what is "
        "right does not depend on the prompt; in the others each episode is trained with the reward of another one of "
        "its step, and the table has the true ones.\n"
        + (f"\n**Not run yet**: {'; '.join(absent)}.\n" if absent else "")
    )
    made = table("agent | run | bar | at first | result | commit", lines)
    return write_page(PAGE, about, ["", made], [*missed, *absent])


def main() -> int:
    """Run all seeds and the controls; return 1 if one misses its bar."""
    given = options(
        __doc__,
        seeds=(None, "fewer than each agent's own number"),
        agents=[agent.name for agent in AGENTS],
        jobs=(1, "runs at once"),
    )
    agents = [agent for agent in AGENTS if agent.name in given.agents]
    for agent in agents:
        if agent.sft:
            train(f"{agent.name}_sft", "start", None)
    runs = [(agent, seed) for agent in agents for seed in (*range(given.seeds or agent.seeds), None)]
    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(lambda one: played(*one), runs):
            keep(LEDGER, found)
    return write()


if __name__ == "__main__":
    sys.exit(main())
