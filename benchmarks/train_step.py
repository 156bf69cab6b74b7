"""The SFT step beside TRL and plain transformers, each at its best setting: real tokens per CPU-second of one thread,
and the memory that a step adds, on the same sequences from the same weights,
so that the losses of every step must be the same.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/train_step.py [--models small4 bigvocab] [--dtypes fp32 bf16] [--rounds 3] [--minutes 7] [--anew]

First one round of ptf and of every setting of the peers (`CELLS`), then further rounds of ptf and of the fastest peer,
one after the other (A, B, A, B, …). Documents: log-normal lengths (median 180, p99 about 2,000, at most 2,048), the
first 40 % of each is prompt, packed into sequences of 2,048; every step has documents of the same lengths with other
tokens. Keeps every round in results/train_step.jsonl, where the next call goes on, and writes results/train_step.md
from it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flow_runs import ROOT, commit, cpu

RESULTS = ROOT / "benchmarks" / "results" / "train_step.md"
KEPT = RESULTS.with_suffix(".jsonl")
PEER = ROOT / ".venv-peers" / "bin" / "python"
WIDTH, LR = 2048, 1e-4
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": WIDTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
MODELS = {"small4": SHAPE | {"vocab_size": 4096}, "bigvocab": SHAPE | {"vocab_size": 151_936}}
# sequences a step; timed steps; the warm-up step's documents are shorter by this
SEQUENCES, STEPS, WARM = {"small4": 4, "bigvocab": 1}, {"small4": 2, "bigvocab": 1}, 8
TRL, LOOP = "benchmarks/peers/trl_sft.py", "benchmarks/peers/hf_sft.py"
DENSE, FLAT, BARE = "SDPA, a dense mask a row", "SDPA, one dense mask over all rows of a pass", "SDPA, causal, no mask"
CELLS: dict[str, dict[str, Any]] = {
    "TRL, packed, 4 rows a pass": {"script": TRL, "packed": True, "pass": 4, "attention": FLAT},
    "TRL, packed, 2 rows a pass": {"script": TRL, "packed": True, "pass": 2, "attention": FLAT},
    "TRL, packed, 1 row a pass": {"script": TRL, "packed": True, "pass": 1, "attention": FLAT},
    "TRL, not packed, a document a pass": {"script": TRL, "packed": False, "pass": 1, "attention": BARE},
    "transformers, packed, 4 rows a pass": {"script": LOOP, "packed": True, "pass": 4, "attention": DENSE},
    "transformers, packed, 1 row a pass": {"script": LOOP, "packed": True, "pass": 1, "attention": DENSE},
    "transformers, a document a pass": {"script": LOOP, "packed": False, "pass": 1, "attention": BARE},
}
OURS = "SDPA, causal, document by document"
APART = {"fp32": 1e-4, "bf16": 5e-3}  # the most that losses of the same step may differ by


def documents(path: Path, vocab: int, rows: int, steps: int) -> None:
    """`lengths` and `tokens` of the documents in the order of their rows, and how many each row has (`rows`), for a
    warm-up step and `steps` others."""
    from ptf.data.packing import pack_all
    from ptf.data.sample import Sample, length

    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(np.log(180), 1.03, 600), 8, WIDTH).astype(int)
    packed = [
        [length(a) for a in row]
        for row in pack_all([(Sample(np.zeros(n, np.int32), np.ones(n, np.float32)),) for n in drawn], WIDTH)
    ]
    work = [sum(n * n for row in packed[i : i + rows] for n in row) for i in range(len(packed) - rows)]
    # rows whose attention costs what rows cost on average
    first = int(np.argmin(np.abs(np.array(work) - np.mean(work))))
    layout = packed[first : first + rows]
    lengths = np.array(
        [[max(2, n // WARM) for row in layout for n in row], *[[n for row in layout for n in row]] * steps]
    ).reshape(-1)
    np.savez(
        path,
        lengths=lengths,
        rows=[len(row) for row in layout] * (steps + 1),
        tokens=rng.integers(0, vocab, lengths.sum()),
    )


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: Trainer.step over packed sequences, as a run does it."""
    from ptf.compute.world import joined
    from ptf.config.sections.model import ModelConfig
    from ptf.config.sections.train import TrainConfig
    from ptf.data.batch import Batch
    from ptf.data.sample import Sample
    from ptf.recipes.sft.recipe import SFT
    from ptf.train.trainer import Trainer, load_model

    stored = np.load(given["documents"])
    parts = iter(np.split(stored["tokens"].astype(np.int32), np.cumsum(stored["lengths"])[:-1]))

    def sample(tokens):
        return Sample(tokens, (np.arange(len(tokens)) >= 0.4 * len(tokens)).astype(np.float32))

    rows = [[(sample(next(parts)),) for _ in range(n)] for n in stored["rows"]]
    total = given["steps"] + given["warmup"]
    with joined("cpu", 600, threads=1) as world:
        place = Path(given["model"])
        settings = {"betas": (0.9, 0.999), "weight_decay": 0.0, **given["train"]}
        train = TrainConfig(steps=total, lr=given["lr"], schedule="constant", precision=given["dtype"], **settings)
        model, _ = load_model(
            place, world, ModelConfig(path=str(place)), seed=0, precision=train.precision, compiled=train.compile
        )
        trainer = Trainer(model, world, train)
        cpu_s, tokens, losses = [], [], []
        base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
        for step in range(total):
            batch = Batch.of(
                rows[step * given["rows"] : (step + 1) * given["rows"]],
                WIDTH if step >= given["warmup"] else WIDTH // WARM + 64,
            )
            began = time.process_time()
            losses.append(trainer.step([batch], SFT(), step)["loss"])
            if step >= given["warmup"]:
                cpu_s.append(time.process_time() - began)
                tokens.append(sum(batch.lengths))
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"cpu_s": cpu_s, "tokens": tokens, "losses": losses, "added_mib": peak - base}))


def round_of(
    system: str, given: dict[str, Any], script: str = "benchmarks/train_step.py", peer: str = TRL
) -> dict[str, Any]:
    """What one round in a process of its own prints; by the peers' Python, unless `system` is ptf."""
    command = [sys.executable, script, "--one"] if system == "ptf" else [str(PEER), peer]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT) if system == "ptf" else "",
    }
    done = subprocess.run(
        [*command, json.dumps(given)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rate(one: dict[str, Any]) -> float:
    """Real tokens per CPU-second."""
    return sum(one["tokens"]) / sum(one["cpu_s"])


def kept(name: str, dtype: str) -> list[dict[str, Any]]:
    """The rounds that were made of a model and a dtype."""
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    return [row for row in rows if (row["model"], row["dtype"]) == (name, dtype)]


def planned(name: str, dtype: str, rounds: int) -> str | None:
    """What comes next: ptf, every setting once, then ptf and the fastest peer by turns."""
    made = [row["system"] for row in kept(name, dtype)]
    cells = [cell for cell, how in CELLS.items() if how["pass"] <= SEQUENCES[name] or not how["packed"]]
    if missing := [system for system in ("ptf", *cells) if system not in made]:
        return missing[0]
    best = fastest(kept(name, dtype))
    return min(("ptf", best), key=made.count) if min(made.count("ptf"), made.count(best)) < rounds else None


def fastest(rows: list[dict[str, Any]]) -> str:
    """Of the peers, each by its first round."""
    first = {row["system"]: rate(row) for row in reversed(rows) if row["system"] != "ptf"}
    return max(first, key=lambda system: first[system])


def compared(name: str, dtype: str, rounds: int, train: dict[str, Any], until: float) -> None:
    """The rounds that are missing, unless the time is over. Raises AssertionError where the two did not do the same."""
    from dpo_step import start

    about = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "hardware": cpu()}
    with tempfile.TemporaryDirectory() as directory:
        path, model = Path(directory) / "documents.npz", start(Path(directory), MODELS[name])
        documents(path, MODELS[name]["vocab_size"], SEQUENCES[name], STEPS[name])
        given = {
            "model": model,
            "documents": str(path),
            "width": WIDTH,
            "rows": SEQUENCES[name],
            "dtype": dtype,
            "steps": STEPS[name],
            "warmup": 1,
            "lr": LR,
        }
        while (system := planned(name, dtype, rounds)) and time.monotonic() < until:
            cell = CELLS.get(system, {"train": train})
            made = round_of(system, given | cell, peer=cell.get("script", TRL))
            first = next((row for row in kept(name, dtype) if row["system"] == "ptf"), made)
            assert made["tokens"] == first["tokens"], "all count the same tokens"
            assert len(made["losses"]) == len(first["losses"]), "all have as many steps"
            assert max(abs(a - b) for a, b in zip(made["losses"], first["losses"], strict=True)) <= APART[dtype], (
                "all have the same losses"
            )
            row = {"model": name, "dtype": dtype, "system": system, "rate": round(rate(made)), **made, **about}
            print(json.dumps(row), flush=True)
            with KEPT.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further round is begun")
    parser.add_argument("--anew", action="store_true", help="forget the rounds that are kept")
    parser.add_argument("--train", type=json.loads, default={}, help="further keys of ptf's train section, as JSON")
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/train_step.py needs the peer's environment: make peers")
    if asked.anew:
        KEPT.unlink(missing_ok=True)
    until = time.monotonic() + 60 * asked.minutes
    for name in asked.models:
        for dtype in asked.dtypes:
            compared(name, dtype, asked.rounds, asked.train, until)
    write(asked.rounds)


def cell(rounds: list[dict[str, Any]]) -> str:
    rates = [rate(one) for one in rounds]
    return f"{median(rates):,.0f}" + (f" ({min(rates):,.0f} – {max(rates):,.0f})" if len(rates) > 1 else "")


def write(rounds: int) -> None:
    """The page, of the rounds that are kept."""
    every = [(name, dtype) for name in MODELS for dtype in APART]
    order = [key for key in every if planned(*key, rounds=1) is None]  # only beside all settings is the fastest known
    table, grid, slower, larger, unfinished, dates = [], [], [], [], [], set()
    for key in order:
        rows, name = kept(*key), f"{key[0]} | {key[1]}"
        best = fastest(rows)
        found = {system: [row for row in rows if row["system"] == system] for system in ("ptf", *CELLS)}
        found = {system: of for system, of in found.items() if of}
        dates |= {row["date"] for row in rows}
        measured = ", ".join(sorted({f"{row['hardware']}, {row['commit']}" for row in rows}))
        if planned(*key, rounds):
            unfinished.append(" in ".join(key))
        ratios = [rate(a) / rate(b) for a, b in zip(found["ptf"], found[best], strict=False)]
        added = {system: median(one["added_mib"] for one in found[system]) for system in ("ptf", best)}
        apart = max(
            abs(a - b)
            for of in found.values()
            for one in of
            for a, b in zip(one["losses"], found["ptf"][0]["losses"], strict=True)
        )
        ratio = f"**{median(ratios):.2f}** ({min(ratios):.2f} – {max(ratios):.2f})"
        memory = f"{added['ptf']:.0f} / {added[best]:.0f} = {added['ptf'] / added[best]:.2f}"
        table.append(
            f"| {name} | {cell(found['ptf'])} | {best} | {cell(found[best])} | {ratio} | {memory} | {apart:.1e} | "
            f"{measured} |"
        )
        if median(ratios) <= 1:
            slower.append(f"{key[0]} in {key[1]}: {best} is {1 / median(ratios):.2f} times as fast")
        if added["ptf"] > added[best]:
            larger.append(f"{' in '.join(key)} ({added['ptf']:,.0f} beside {added[best]:,.0f} MiB)")
        for system, of in {
            "ptf": found["ptf"][:1],
            **{cell: of[:1] for cell, of in found.items() if cell != "ptf"},
        }.items():
            attention = OURS if system == "ptf" else CELLS[system]["attention"]
            mark = " (the best)" if system == best else ""
            quicker = rate(of[0]) / rate(found["ptf"][0])
            grid.append(
                f"| {name} | {system}{mark} | {attention} | {cell(of)} | {quicker:.2f} | {of[0]['added_mib']:,.0f} |"
            )
    loses = (
        "ptf loses here: " + "; ".join(slower) + ".\n\n"
        if slower
        else "On one thread of this CPU no setting of a peer is faster than ptf, of what was measured.\n\n"
    )
    if larger:
        loses += f"ptf's step adds more memory than that of the fastest peer: {', '.join(larger)}.\n\n"
    if left := [*unfinished, *(" in ".join(key) for key in every if key not in order)]:
        loses += f"Not all rounds were made yet: {', '.join(left)}.\n\n"
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in APART.items())
    RESULTS.write_text(
        "# The SFT step beside TRL and plain transformers\n\n"
        + loses
        + "Command: `python benchmarks/train_step.py` (`make peers bench-train`)  \nHardware and commit: "
        "in each row; one thread, no GPU  \n"
        f"Date: {', '.join(sorted(dates))}\n\n"
        "Real tokens per CPU-second; of the peers, those of the setting that is fastest here. Interleaved rounds, "
        "each in a process of\n"
        "its own; median and range. The same sequences in the same order from the same weights: "
        "packed documents of log-normal lengths\n"
        "(median 180, p99 about 2,000), the first 40 % prompt, sequences of 2,048; fused AdamW, clip 1. "
        "The script asserts that all count\n"
        f"the same tokens and that the losses of every step agree (to {bounds}); the largest\n"
        "difference of any stands in the table. `small4`: Qwen3 shape, width 256, 4 layers, 4 heads of 64, "
        "vocabulary 4,096,\n"
        f"{SEQUENCES['small4']} sequences a step; `bigvocab`: vocabulary 151,936, tied, "
        f"{SEQUENCES['bigvocab']} sequence a step. TRL: "
        "SFTTrainer, whose head makes no full\n"
        "logits; transformers: a loop with the model's own loss over full logits; "
        "versions in `benchmarks/requirements-peers.txt`;\n"
        "bf16 is autocast over weights of fp32 for all. ptf: its defaults (`train.compile` is off on a CPU), "
        "all sequences of a step in one pass.\n"
        "These ratios are a CPU's: on a GPU with flash attention a mask costs the peers nothing.\n\n"
        "| model | dtype | ptf | fastest peer | its tokens per CPU-second | ratio | MiB that the step adds | losses "
        "apart | measured |\n"
        "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(table) + "\n\n"
        "All settings, one round each, beside ptf's in the same minutes:\n\n"
        "| model | dtype | system | attention | tokens per CPU-second | of ptf's | MiB added |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(grid) + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
