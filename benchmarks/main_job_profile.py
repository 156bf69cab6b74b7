"""Where a GRPO step of the main job goes: wall seconds by phase, CPU-seconds by process, and what each process does.

    make peers && make run                        # py-spy, and the model that SFT publishes
    python benchmarks/main_job_profile.py [--seconds 30] [--rate 20]

Runs `ptf train configs/tiny/grpo.yaml` as `make run` does, and looks at the same run twice, after its first 20 steps:
first by the processes' own CPU times, which costs nothing, then with py-spy, whose samples of the threads that compute
are divided by what is on the stack (`WORK`). Samples give shares, the first look the seconds. Writes
results/main_job_profile.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from flow_runs import ROOT, commit, cpu, results_page

RESULTS = results_page("main_job_profile.md")
SAMPLER = ROOT / ".venv-peers" / "bin" / "py-spy"
PUBLISHED = ROOT / "runs" / "tiny" / "sft" / "published"
FIRST, STARTS_WITHIN_S = 20, 180
CONTROLLER, POLICY, ROLLOUT, REWARD = "controller", "policy", "rollout", "reward"
RAY = "Ray's own processes"
# of each process: what it does, and of what one part is on the stack; the first that fits counts
WORK: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    ROLLOUT: [
        ("vLLM: the model's forward pass", ("execute_model",)),
        ("vLLM: sampling", ("sample_tokens",)),
        ("the canary's prompts", ("prompt_logprobs",)),
        ("loading weights", ("load_weights",)),
        ("vLLM: taking requests", ("VLLMEngine._admit",)),
        ("vLLM: scheduling and collecting tokens", ("LLMEngine.step",)),
        ("ptf: from vLLM's tokens to the episodes that wait", ("Stepper._run",)),
        ("Ray: sending and receiving", ("serialize", "ray/_private/serialization", "object_ref")),
        ("ptf: episodes", ("Sampler.rollout", "_run_one")),
    ],
    POLICY: [
        ("update: forward and backward pass", ("Trainer.forward_backward",)),
        ("update: optimizer and checks", ("Trainer.step",)),
        ("update: packing", ("Learner.update",)),
        ("the canary's prompts", ("Learner.prompt_logprobs",)),
        ("log-probs before the update", ("Learner.logprobs",)),
        ("weights and their digests", ("Learner.collect_weights",)),
        ("Ray: sending and receiving", ("serialize", "ray/_private/serialization")),
    ],
    CONTROLLER: [
        ("rewards: calls of their process", ("WorkerProcess",)),
        ("heartbeats", ("Monitor.poll",)),
        ("Ray: sending, waiting, receiving", ("ray/_private", "ray/actor", "Gang.")),
        ("prompts: reading and rendering", ("FittingPrompts.__next__",)),
        ("advantages", ("compute_advantages",)),
        ("metrics and samples", ("Controller._log", "ResponseLog.log", "outcome_metrics")),
    ],
    REWARD: [],
}
REST = {ROLLOUT: "Ray: worker, and the rest", POLICY: "Ray: worker, and the rest", CONTROLLER: "the rest"}


def model() -> str:
    """The newest model that `make run`'s SFT published."""
    try:
        return str(PUBLISHED / json.loads((PUBLISHED / "latest.json").read_text())["version"])
    except FileNotFoundError:
        sys.exit("benchmarks/main_job_profile.py needs the model of SFT: make run")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def processes(launcher: psutil.Process) -> dict[psutil.Process, str]:
    """The run's processes, and which role each has."""
    found, ranks = {launcher: CONTROLLER}, []
    for process in launcher.children(recursive=True):
        words = " ".join(process.cmdline())
        if words.startswith("ray::RoleRank"):
            ranks.append(process)
        found[process] = REWARD if "ptf.rl.worker_server" in words else RAY
    policy, rollout = sorted(ranks, key=lambda process: process.create_time())
    return found | {policy: POLICY, rollout: ROLLOUT}


def used(of: dict[psutil.Process, str]) -> Counter[str]:
    """CPU-seconds of each role's processes so far."""
    total = Counter[str]()
    for process, role in of.items():
        times = process.cpu_times()
        total[role] += times.user + times.system
    return total


def sampled(of: dict[psutil.Process, str], seconds: int, rate: int, place: Path) -> dict[str, Counter[str]]:
    """Samples of each role's threads that compute, by the work that they do."""
    asked = {role: place / f"{role}.txt" for role in WORK}
    options = ["-d", str(seconds), "-r", str(rate), "-f", "raw", "--nonblocking"]
    running = [
        subprocess.Popen(
            [str(SAMPLER), "record", "-p", str(process.pid), *options, "-o", str(asked[role])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for process, role in of.items()
        if role in asked
    ]
    for one in running:
        if one.wait(timeout=seconds + 60):
            sys.exit("py-spy could not look into the run's processes: it needs the right to trace them (ptrace)")
    found = {}
    for role, path in asked.items():
        found[role] = Counter[str]()
        for line in path.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            found[role][work_of(role, stack)] += int(count)
    return found


def work_of(role: str, stack: str) -> str:
    """The work that a stack stands for."""
    for work, parts in WORK[role]:
        if any(part in stack for part in parts):
            return work
    return REST.get(role, "all")


def looked_at(asked: argparse.Namespace, place: Path) -> dict[str, Any]:
    """One run, looked at twice."""
    steps = FIRST + 6 * asked.seconds
    words = [f"output={place}", f"train.steps={steps}", f"model.path={model()}", "checkpoint.every=100000"]
    command = ["-m", "ptf.cli", "train", "configs/tiny/grpo.yaml", "--run-name", "profile"]
    with (place / "log.txt").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, *command, *(word for one in words for word in ("--set", one))],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    metrics = place / "profile" / "metrics.jsonl"
    try:
        until = time.monotonic() + STARTS_WITHIN_S
        while len(rows(metrics)) < FIRST:
            if run.poll() is not None or time.monotonic() > until:
                sys.exit(f"the run did not begin:\n{(place / 'log.txt').read_text()[-3000:]}")
            time.sleep(0.2)
        of = processes(psutil.Process(run.pid))
        before, began = used(of), len(rows(metrics))
        time.sleep(asked.seconds)
        after, ended = used(of), len(rows(metrics))
        work = sampled(of, asked.seconds, asked.rate, place)
        slowed = rows(metrics)[ended + 1 :]
        assert run.poll() is None, "the run ended before the last sample"
    finally:
        run.terminate()  # it writes a checkpoint, and ends
        run.wait(timeout=120)
    counted = rows(metrics)[began:ended]
    return {
        "steps": len(counted),
        "wall": median(row["step_s"] for row in counted),
        "slowed": median(row["step_s"] for row in slowed),
        "tokens": median(row["sampled_tokens"] for row in counted),
        "phases": {
            key.removeprefix("seconds/"): median(row[key] for row in counted)
            for key in counted[-1]
            if key.startswith("seconds/")
        },
        "cpu_s": {role: (after[role] - before[role]) / len(counted) for role in after},
        "work": {role: dict(counts.most_common()) for role, counts in work.items()},
    }


def write(found: dict[str, Any], asked: argparse.Namespace) -> None:
    """The page."""
    total = sum(found["cpu_s"].values())
    phases = sorted(found["phases"].items(), key=lambda one: -one[1])
    lines = ["| phase | wall, s | share |", "|---|---|---|"]
    lines += [f"| {name} | {seconds:.3f} | {seconds / found['wall']:.0%} |" for name, seconds in phases]
    between = found["wall"] - sum(found["phases"].values())
    lines += [f"| between them | {between:.3f} | {between / found['wall']:.0%} |", ""]
    lines += ["| process | work | CPU-s a step | share of all |", "|---|---|---|---|"]
    for role, seconds in sorted(found["cpu_s"].items(), key=lambda one: -one[1]):
        lines.append(f"| **{role}** | | **{seconds:.3f}** | **{seconds / total:.0%}** |")
        counts = found["work"].get(role, {})
        for work, count in counts.items() if len(counts) > 1 else ():
            part = seconds * count / sum(counts.values())
            lines.append(f"| | {work} | {part:.3f} | {part / total:.0%} |")
    samples = sum(sum(counts.values()) for counts in found["work"].values())
    RESULTS.write_text(
        "# Where a GRPO step of the main job goes\n\n"
        f"Command: `{' '.join(['python benchmarks/main_job_profile.py', *sys.argv[1:]])}` "
        "(`make peers run bench-main-job-profile`)  \n"
        f"Hardware: {cpu()}, no GPU  \nDate: {time.strftime('%Y-%m-%d')}  \nCommit: {commit()}\n\n"
        "`configs/tiny/grpo.yaml` from the model that SFT published, as `make run` trains it: a model of 0.6 million\n"
        f"parameters, 64 prompts with 8 responses each, {found['tokens']:,.0f} sampled tokens a step, two optimizer "
        "steps; vLLM, Ray, a process\n"
        f"for rewards. Medians of {found['steps']} steps: **{found['wall']:.2f} s of wall clock, {total:.2f} "
        "CPU-seconds of all processes**. Shares of a process's work are\n"
        f"of {samples:,} samples (py-spy, {asked.rate} a second and thread, threads that compute; a step took "
        f"{found['slowed']:.2f} s then), its seconds are the\n"
        "system's own count without py-spy.\n\n" + "\n".join(lines) + "\n"
    )
    print(f"wrote {RESULTS.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30, help="of each look")
    parser.add_argument("--rate", type=int, default=20, help="samples a second")
    asked = parser.parse_args()
    if not SAMPLER.exists():
        sys.exit("benchmarks/main_job_profile.py needs py-spy: make peers")
    with tempfile.TemporaryDirectory() as directory:
        found = looked_at(asked, Path(directory))
    print(json.dumps(found))
    write(found, asked)


if __name__ == "__main__":
    main()
