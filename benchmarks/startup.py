"""What a process costs before it works: CPU-seconds of `ptf --help`, of `ptf check`, of the imports of a rank, of a
reward process and of a rank on Ray, of starting Ray and vLLM; and the packages that a rank's imports go to. Writes
results/startup.md, and prints a JSON line for each result.

    python benchmarks/startup.py [--rounds 5] [--vllm]

Each is measured in a fresh process, in turn. Bytecode is cached, as after the first run of an installation, and
OMP_NUM_THREADS is 1. Exits 1 if a median misses its aim.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.flow_runs import ROOT, results_page
from benchmarks.pages import head, spread, table, write_page

CLI = ("-m", "ptf.cli")
AIMS = {"ptf --help": 0.4, "ptf check, SFT": 0.4, "ptf check, GRPO": 0.4, "SFT rank": 2.0, "reward process": 2.0}
AIMS |= {"rank on Ray, beyond `import verl` without garbage collection": 2.0}
SHARES = 14  # packages in the table of a rank's imports
SPLIT = ("torch", "transformers")  # packages that are listed by their subpackages
LAUNCHED_BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
Figures = dict[str, float]


class FirstStep(Exception):
    """Training has reached its first step."""


class Imports:
    """CPU-seconds of this process's imports since this object was made."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._within, self._import = threading.local(), sys.modules["_frozen_importlib"]._find_and_load
        sys.modules["_frozen_importlib"]._find_and_load = self._counted  # type: ignore[attr-defined]

    def _counted(self, name: str, import_: Callable) -> Any:
        """Import what no import has loaded yet, as `import` and importlib.import_module both do."""
        if getattr(self._within, "an_import", False):
            return self._import(name, import_)
        self._within.an_import, began = True, time.thread_time()
        try:
            return self._import(name, import_)
        finally:
            self._within.an_import = False
            self.cpu_s += time.thread_time() - began
            if name == "ptf.train.loop":
                end_at_the_first_step()


def end_at_the_first_step() -> None:
    """Let the first step of training raise FirstStep instead."""
    from ptf.train.trainer import Trainer

    def step(self: Trainer, *_: object, **__: object) -> None:
        raise FirstStep

    Trainer.step = step  # type: ignore[method-assign, assignment]


def rank(directory: Path) -> Figures:
    """Be the one rank of a group (gloo), as torchrun starts it, until its first step."""
    imports = Imports()
    os.environ.update(LAUNCHED_BY_HAND, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from ptf import run

    try:
        run.main([str(directory / "torchrun.yaml"), "--run-name", f"rank-{os.getpid()}"])
    except FirstStep:
        return {"SFT rank": imports.cpu_s, "SFT rank, whole process": time.process_time()}
    raise AssertionError("no step was taken")


def reward(directory: Path) -> Figures:
    """Score one response in a reward process, and return what the process has used."""
    from ptf.config import Plugin
    from ptf.rl.rewards.scoring import RewardWorkers

    workers = RewardWorkers(Plugin(use="ptf.tasks.arithmetic:exact"))
    assert [outcome.value for outcome in workers.score([({"answer": "2"}, "2")])] == [1.0]  # type: ignore[union-attr]
    process = workers.workers[0].process
    assert process is not None
    used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    workers.close()
    return {"reward process": (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")}


def on_ray(directory: Path) -> Figures:
    """Start Ray as ptf does, and on it a gang of one rank until its first step."""
    import psutil
    import ray

    from benchmarks.startup import rank_on_ray  # by its name, which the rank imports, too
    from ptf.compute.gang import Gang
    from ptf.compute.lease import hold_lease
    from ptf.compute.ray_session import ray_session
    from ptf.config import load
    from ptf.run import write_job_file

    def used() -> float:
        this = psutil.Process()
        times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    job, run = load(directory / "ray.yaml"), directory / f"ray-{os.getpid()}"
    run.mkdir()
    before, began = used(), time.perf_counter()
    with hold_lease(job, run) as lease, ray_session(workdir=run, cpus=2):
        ray.get(ray.remote(lambda: None).remote())
        started = {
            "Ray, until its first task has ended": used() - before,
            "the same, wall": time.perf_counter() - began,
        }
        write_job_file(job, run)
        with closing(Gang("gang", workers=1, threads=1, timeout_s=300.0)) as gang:
            (found,) = gang.execute(rank_on_ray, [(str(run), lease)])
    return started | found


def rank_on_ray(directory: str, lease: Any) -> Figures:
    """Be a rank on Ray until its first step; what its process had used before is Ray's, verl's and the gang's."""
    before, imports = time.process_time(), Imports()
    from ptf.run import run_rank

    try:
        run_rank(directory, lease)
    except FirstStep:
        return {"rank on Ray, before its function": before, "rank on Ray, imports of its function": imports.cpu_s}
    raise AssertionError("no step was taken")


def vllm(directory: Path) -> Figures:
    """Make ptf's vLLM engine with a model of two layers."""
    from ptf.rl.engines.vllm_engine import VLLMEngine, engine_env

    os.environ.update(engine_env(directory / "vllm"))
    before, began, imports = sum(os.times()[:4]), time.perf_counter(), Imports()
    VLLMEngine(str(next(directory.glob("model-*"))), seed=0, dtype="float32", max_model_len=64, cpu_kv_cache_gib=0.1)
    wall, whole = time.perf_counter() - began, sum(os.times()[:4]) - before
    return {"vLLM engine": whole, "vLLM engine, its imports": imports.cpu_s, "vLLM engine, wall": wall}


INSIDE: dict[str, Callable[[Path], Figures]] = {"rank": rank, "reward": reward, "ray": on_ray, "vllm": vllm}


def commands(directory: Path) -> dict[str, Sequence[str]]:
    """Return what is measured as a whole process: its name, and the arguments of Python."""
    imports = {f"import {name}": ("-c", f"import {name}") for name in ("torch", "transformers", "verl")}
    # as a rank imports it
    imports["import verl, without garbage collection"] = ("-c", "import gc; gc.disable(); import verl")
    checks = {
        f"ptf check, {name.upper()}": (*CLI, "check", f"{ROOT}/configs/tiny/{name}.yaml") for name in ("sft", "grpo")
    }
    checks["ptf check, SFT, with data that it counts"] = (*CLI, "check", f"{directory}/torchrun.yaml")
    return {"python -c pass": ("-c", "pass"), **imports, "ptf --help": (*CLI, "--help"), **checks}


def write_jobs(directory: Path, engine: bool) -> None:
    """Write the jobs and models that are measured."""
    import yaml

    from tests.tiny import arithmetic

    raw = arithmetic(directory)
    jobs = {name: {**raw, "compute": {"launcher": name, "device": "cpu", "threads": 1}} for name in ("torchrun", "ray")}
    for name, job in jobs.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(job))
    if engine:
        from ptf.rl.engines.conformance import small_model

        small_model(directory, 0)


def python(arguments: Sequence[str], directory: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run Python; return the CPU-seconds of the process and of its children that it waited for. Exits if it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PTF_LAUNCHED": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=env, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"python {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def one_round(directory: Path, inside: Sequence[str]) -> Figures:
    """Return each figure once."""
    figures = {name: python(arguments, directory)[0] for name, arguments in commands(directory).items()}
    for name in inside:
        done = python([__file__, "--inside", name, "--directory", str(directory)], directory)[1]
        figures |= json.loads(done.stdout.splitlines()[-1])
    on_ray_s = figures["rank on Ray, before its function"] + figures["rank on Ray, imports of its function"]
    return figures | {
        "rank on Ray, beyond `import verl` without garbage collection": on_ray_s
        - figures["import verl, without garbage collection"]
    }


def imported_by_a_rank(directory: Path, runs: int = 3) -> dict[str, float]:
    """Return the milliseconds that a rank's imports spend in each package's own modules: of each module, the least of
    some runs of `python -X importtime`."""
    least: dict[str, float] = {}
    for _ in range(runs):
        done = python(["-X", "importtime", __file__, "--inside", "rank", "--directory", str(directory)], directory)[1]
        for module, spent_us in self_times(done.stderr):
            least[module] = min(spent_us, least.get(module, spent_us))
    packages: dict[str, float] = {}
    for module, spent_us in least.items():
        words = module.split(".")
        package = ".".join(words[:2] if words[0] in SPLIT else words[:1])
        packages[package] = packages.get(package, 0.0) + spent_us / 1000
    return dict(sorted(packages.items(), key=lambda item: -item[1]))


def self_times(text: str) -> Iterator[tuple[str, int]]:
    """Yield each module and its own microseconds from what `-X importtime` prints."""
    for line in text.splitlines():
        spent, *_, module = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and spent.strip().isdigit():
            yield module.strip(), int(spent)


def summary(rounds: Sequence[Figures]) -> tuple[str, list[str]]:
    """Return the table, and what missed its aim."""
    rows, missed = [], list[str]()
    for name in rounds[0]:
        taken, aim = [one[name] for one in rounds], AIMS.get(name)
        if aim is not None and median(taken) > aim:
            missed.append(name)
        verdict = "" if aim is None else "missed" if name in missed else "met"
        rows.append([name, "" if aim is None else aim, spread(taken, ".2f"), verdict])
        print(json.dumps({"what": name, "aim_s": aim, "median_s": round(median(taken), 3), "rounds_s": taken}))
    return table("what | aim, s | median, s (range) | ", rows), missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", action="store_true", help="start vLLM, too, which takes half a minute a round")
    parser.add_argument("--inside", choices=INSIDE, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(INSIDE[asked.inside](asked.directory)), flush=True)
        return 0
    inside = [name for name in INSIDE if name != "vllm" or asked.vllm]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_jobs(directory, asked.vllm)
        one_round(directory, inside)  # writes the bytecode
        load = os.getloadavg()[1]
        rounds = [one_round(directory, inside) for _ in range(asked.rounds)]
        load = (load + os.getloadavg()[1]) / 2
        packages = imported_by_a_rank(directory)
    lines, missed = summary(rounds)
    whole = sum(packages.values())
    shares = [(package, f"{ms:.0f}", f"{ms / whole:.0%}") for package, ms in list(packages.items())[:SHARES]]
    words = f"\nA rank's imports, {whole / 1000:.2f} s, by the package whose own modules they are (`-X importtime`):\n"
    hardware = f", no GPU, OMP_NUM_THREADS=1; load average {load:.1f} with this"
    about = head("What a process costs before it works", hardware) + (
        f"CPU-seconds (user and system) in fresh processes, {asked.rounds} rounds of all in turn, bytecode cached. "
        "Work beside it makes\nevery figure larger; `import torch` in the same table is the measure.\n\n"
    )
    lines = [lines, words, table("package | ms | share", shares), NOTES.rstrip()]
    return write_page(results_page("startup.md"), about, lines, missed)


NOTES = """
What a rank still imports is torch, its distributed tensors (with sympy), transformers, which lists the installed
distributions (`importlib.metadata.packages_distributions`) and reads `__all__` of every model family, and
torch._dynamo, which `torch.optim.Optimizer` and FSDP import when they are made. `ptf check` imports as much where
the data and the tokenizer are on this machine, to say how often the run passes over them.

Each step of a flow is a process of its own and starts the Ray and the vLLM that it needs. If train and evaluate of one
run shared them on one machine, an online job with vLLM would save one start of Ray and one of vLLM, and an offline job
of several workers one start of Ray. With several workers and vLLM, evaluate starts Ray twice, for held-out rows and for
the engine; one session around both would save the second start.

An import is measured as a whole process, which also ends; what a rank on Ray needs beyond it can therefore be below 0.
"""


if __name__ == "__main__":
    sys.exit(main())
