"""What starting ranks through Ray costs a step: the same SFT job with `compute.launcher: ray` and `torchrun`, 2 workers
of one thread, in turn. Writes results/launch.md.

    python benchmarks/launch.py [--rounds 3] [--steps 60]

Prints a JSON line a run. The step is the median of `step_s` in the run's metrics, the first ten left out; start and end
are counted apart. CPU-seconds are those of the two ranks over the same steps, sampled from outside: what the ranks do
more under one launcher, whatever else the machine does.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import yaml  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.compute.tracking import read_metrics  # noqa: E402
from ptf.config import loads  # noqa: E402
from ptf.run import run  # noqa: E402
from tests.tiny import arithmetic  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "launch.md"
RANK = ("ray::Rank.run", "-m ptf.run")  # in a rank's command line
LAUNCHERS = ("torchrun", "ray")
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
}
WARM = 10


class Watch(threading.Thread):
    """CPU-seconds of the ranks, twice a second, by time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: dict[int, list[tuple[float, float]]] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        ranks: dict[int, psutil.Process] = {}
        while not self.ended.wait(0.5):
            if len(ranks) < 2:
                ranks |= ranks_here()
            for pid, process in list(ranks.items()):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self.seen.setdefault(pid, []).append((time.time(), times.user + times.system))

    def between(self, start: float, end: float) -> float:
        """Of both together, a second of wall clock."""
        self.ended.set()
        self.join()
        total = 0.0
        for samples in self.seen.values():
            inside = [(at, spent) for at, spent in samples if start <= at <= end]
            total += (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
        return total


def ranks_here() -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "torch.distributed.run" not in line and any(name in line for name in RANK):
                found[process.pid] = process
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as scratch:
        raw = arithmetic(Path(scratch), rows=2000)
        config = Path(scratch) / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | SHAPE))
        raw["data"] |= {"seq_len": 512, "validation": {}}
        raw["train"] |= {
            "steps": asked.steps,
            "global_batch_sequences": 8,
            "micro_batch_sequences": 4,
            "validate_every": 0,
        }
        raw["checkpoint"] = {"every": 10_000}
        for number in range(asked.rounds):
            for name in LAUNCHERS:
                job = {**raw, "compute": {"launcher": name, "workers": 2, "threads": 1, "device": "cpu"}}
                watch, began = Watch(), time.perf_counter()
                watch.start()
                directory = run(loads(yaml.safe_dump(job)), f"{name}-{number}")
                rest = time.perf_counter() - began
                rows = read_metrics(directory / "metrics.jsonl")
                steps = [row["step_s"] for row in rows]
                busy = watch.between(rows[WARM - 1]["time"], rows[-1]["time"])
                spent = busy * (rows[-1]["time"] - rows[WARM - 1]["time"]) / len(steps[WARM:])
                found[name].append({"step_s": median(steps[WARM:]), "cpu_s": spent, "rest_s": rest - sum(steps)})
                print(json.dumps({"launcher": name, "round": number, **found[name][-1]}), flush=True)
    ratio = {
        key: [a[key] / b[key] for a, b in zip(found["ray"], found["torchrun"], strict=True)]
        for key in ("step_s", "cpu_s")
    }
    said = {key: f"**{median(of):.3f}** ({min(of):.3f} – {max(of):.3f})" for key, of in ratio.items()}

    def cell(of):
        return f"{median(of) * 1000:.0f} ({min(of) * 1000:.0f} – {max(of) * 1000:.0f})"

    lines = "".join(
        (
            f"| {name} | {cell([r['step_s'] for r in rounds])} | {cell([r['cpu_s'] for r in rounds])} | "
            f"{median(r['rest_s'] for r in rounds):.1f} |\n"
        )
        for name, rounds in found.items()
    )
    RESULTS.write_text(
        "# The gang beside torchrun\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/launch.py', *sys.argv[1:]])}`  \nHardware: {cpu()}, "
        "2 ranks of one thread, gloo  \n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"A Qwen3 shape of width 256 with 4 layers, 8 sequences of 512 tokens a step, {asked.steps} steps, "
        f"{asked.rounds} runs of each in turn.\n\n"
        "| launcher | milliseconds a step, median of runs' medians (range) "
        "| CPU-milliseconds of both ranks a step | seconds for start and end |\n"
        f"|---|---|---|---|\n{lines}\n"
        f"A step through Ray takes {said['step_s']} of torchrun's wall clock, "
        f"and {said['cpu_s']} of its ranks' CPU-seconds, by rounds.\n"
        "Both ranks run on the two threads of one core here, so Ray's own processes are at their expense.\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
