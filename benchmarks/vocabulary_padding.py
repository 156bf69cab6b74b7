"""What it costs or saves to fill a vocabulary up to a multiple of 64 rows: the head's GEMM,
and the cross-entropy over it with its gradients.

Qwen3's 151,669 tokens as they are, against the same filled up to 151,680 (what ptf makes of them) and to 151,936 (what
the published checkpoint holds). All three run in turn, in an order that rotates, so that a neighbour on the machine
hits them alike; process CPU-seconds on a CPU, CUDA events on a GPU. The losses of all three must agree.

    python benchmarks/vocabulary_padding.py [--rounds 15] [--tokens 96] [--dim 256]

writes benchmarks/results/vocabulary_padding.md.
"""

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ptf.model.chunked import cross_entropy  # noqa: E402
from ptf.model.head import Head  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vocabulary_padding.md"
VOCAB = 151_669
ROWS = {"as it is": VOCAB, "multiple of 64": -(-VOCAB // 64) * 64, "as published": 151_936}


class Case:
    """One number of rows, and what is measured on it."""

    def __init__(self, rows: int, tokens: int, dim: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.zeros(rows, dim)
        weight[:VOCAB].normal_(0, 0.02, generator=generator)
        x = torch.empty(1, tokens, dim).normal_(generator=generator)
        self.targets = torch.randint(0, VOCAB, (1, tokens), generator=generator).to(device)
        self.weights = torch.ones(1, tokens, device=device)
        self.x, self.weight = (t.to(device, dtype).requires_grad_() for t in (x, weight))
        self.loss = 0.0

    def gemm(self) -> None:
        with torch.no_grad():
            self.x[0] @ self.weight.t()

    def step(self) -> None:
        self.x.grad = self.weight.grad = None
        loss = cross_entropy(self.x, Head(self.weight, VOCAB), self.targets, self.weights)
        loss.backward()
        self.loss = loss.detach().item()


def seconds(run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Of one call: CPU time of this process, or time on the GPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeat
    began = time.process_time()
    for _ in range(repeat):
        run()
    return (time.process_time() - began) / repeat


def measure(cases: dict[str, Case], device: torch.device, rounds: int) -> dict[tuple[str, str], list[float]]:
    """(what, which) → seconds of each round. The first round warms up and is dropped."""
    found: dict[tuple[str, str], list[float]] = {}
    names = list(cases)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for what, run, repeat in (
                ("head GEMM", cases[name].gemm, 5),
                ("cross-entropy, with gradients", cases[name].step, 1),
            ):
                found.setdefault((what, name), []).append(seconds(run, device, repeat))
    return {key: values[1:] for key, values in found.items()}


def page(found: dict[tuple[str, str], list[float]], setting: str, command: str, hardware: str) -> str:
    lines = []
    for what in dict.fromkeys(w for w, _ in found):
        base = found[what, "as it is"]
        for name, rows in ROWS.items():
            values = found[what, name]
            low, middle, high = statistics.quantiles(values, n=4)
            ratio = [v / b for v, b in zip(values, base, strict=True)]  # of the same round
            _, against, _ = statistics.quantiles(ratio, n=4)
            spread = "–" if name == "as it is" else f"{against:.3f} [{min(ratio):.2f}, {max(ratio):.2f}]"
            lines.append(
                f"| {what} | {rows:,} ({name}) | {middle * 1e3:.1f} [{low * 1e3:.1f}, {high * 1e3:.1f}] | {spread} |"
            )
    return (
        f"# Filling up the vocabulary\n\nCommand: `{command}`  \nHardware: {hardware}  \nDate: "
        f"{datetime.date.today()}\n\n{setting}\n\n"
        "| what | rows | ms: median [quartiles] | against as it is, same round: median [least, most] |\n"
        "|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, help="default: 96 on a CPU, 8192 on a GPU")
    parser.add_argument("--dim", type=int, help="default: 256 on a CPU, 1024 on a GPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    tokens, dim = given.tokens or (8192 if gpu else 96), given.dim or (1024 if gpu else 256)
    dtype = torch.bfloat16 if gpu else torch.float32
    if not gpu:
        torch.set_num_threads(1)
    cases = {name: Case(rows, tokens, dim, device, dtype) for name, rows in ROWS.items()}
    found = measure(cases, device, given.rounds)
    losses = {name: case.loss for name, case in cases.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(losses["as it is"]):
        raise SystemExit(f"padding changed the loss: {losses}")
    clock = "GPU time" if gpu else "CPU time of one thread"
    setting = (
        f"{tokens} tokens of width {dim}, {str(dtype).removeprefix('torch.')}, {clock}, {given.rounds} rounds in turn."
    )
    hardware = (
        torch.cuda.get_device_name()
        if gpu
        else next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            "unknown CPU",
        )
    )
    text = page(found, setting, " ".join(["python", "benchmarks/vocabulary_padding.py", *sys.argv[1:]]), hardware)
    given.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
