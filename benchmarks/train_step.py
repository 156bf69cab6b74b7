"""The SFT step beside TRL, transformers' Trainer and plain transformers, each at the fastest of its settings: real
tokens per CPU-second of one thread, and the memory that a step adds, on the same sequences from the same weights.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/train_step.py [--models small4 bigvocab] [--dtypes fp32 bf16] [--rounds 3] [--minutes 7] [--anew]

First one round of every cell of the grid (`GRID`): ptf, ptf compiled, and all settings of the peers. A setting that a
library refuses is kept with the library's own words. Then further rounds of ptf, of ptf compiled and of the settings
that ptf is set beside (`rivals`), one after the other (A, B, C, A, B, C, …). Every round must start from the same
weights, train the same token ids in the same order, count the same tokens and have the same losses. Documents:
log-normal lengths (median 180, p99 about 2,000, at most 2,048), the first 40 % of each is prompt, packed into sequences
of 2,048; every step has documents of the same lengths with other tokens. Keeps every round with its settings in
results/train_step.jsonl, where the next call with the same code of ptf on a CPU of the same name goes on, and writes
results/train_step.md from the rounds of today's settings and the newest code.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

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
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": WIDTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
PAD = 0  # with which peers fill up; no document has it
HEADS = f"{SHAPE['num_attention_heads']} query and {SHAPE['num_key_value_heads']} key heads of {SHAPE['head_dim']}"
MODELS = {"small4": SHAPE | {"vocab_size": 4096}, "bigvocab": SHAPE | {"vocab_size": 151_936}}
# sequences a step; timed steps. Two steps of the same shapes come before them untimed: the first touches memory,
# compiles and ends with AdamW's state, beside which the second looks for memory once more
SEQUENCES, STEPS, WARM = {"small4": 4, "bigvocab": 1}, {"small4": 1, "bigvocab": 1}, 2
TRL, LOOP = "benchmarks/peers/trl_sft.py", "benchmarks/peers/hf_sft.py"
TRAINER, RESPONSES = "benchmarks/peers/hf_trainer.py", "benchmarks/peers/hf_responses.py"
BOTH, SMALL, LARGE = tuple(MODELS), ("small4",), ("bigvocab",)
ONE_ROW = "TRL, packed, 1 row a pass"
# peer, how the documents of a pass lie, sequences or documents a pass (the others are accumulated), attention, compiled
# by torch, Liger's kernels, models. `bigvocab` has one sequence a step, whose four documents are a pass without padding
# too; what a library refuses, it refuses whatever the vocabulary; a loop that makes the logits of responses alone gains
# little where they are few.
GRID: dict[str, tuple[str, str, int, str, bool, bool, tuple[str, ...]]] = {
    "TRL, packed, 4 rows a pass": (TRL, "packed", 4, "sdpa", False, False, SMALL),
    "TRL, packed, 2 rows a pass": (TRL, "packed", 2, "sdpa", False, False, SMALL),
    ONE_ROW: (TRL, "packed", 1, "sdpa", False, False, BOTH),
    "TRL, padding-free, 8 documents a pass": (TRL, "padding-free", 8, "sdpa", False, False, SMALL),
    "TRL, padding-free, 4 documents a pass": (TRL, "padding-free", 4, "sdpa", False, False, SMALL),
    "TRL, a document a pass": (TRL, "documents", 1, "sdpa", False, False, BOTH),
    "TRL, packed, 1 row a pass, eager attention": (TRL, "packed", 1, "eager", False, False, SMALL),
    "TRL, a document a pass, eager attention": (TRL, "documents", 1, "eager", False, False, SMALL),
    "TRL, packed, 1 row a pass, flex attention": (TRL, "packed", 1, "flex_attention", False, False, SMALL),
    "TRL, a document a pass, compiled": (TRL, "documents", 1, "sdpa", True, False, SMALL),
    "TRL, a document a pass, Liger": (TRL, "documents", 1, "sdpa", False, True, SMALL),
    "Trainer, packed, 1 row a pass": (TRAINER, "packed", 1, "sdpa", False, False, BOTH),
    "Trainer, a document a pass": (TRAINER, "documents", 1, "sdpa", False, False, BOTH),
    "transformers, packed, 4 rows a pass": (LOOP, "packed", 4, "sdpa", False, False, SMALL),
    "transformers, packed, 2 rows a pass": (LOOP, "packed", 2, "sdpa", False, False, SMALL),
    "transformers, packed, 1 row a pass": (LOOP, "packed", 1, "sdpa", False, False, BOTH),
    "transformers, padding-free, 8 documents a pass": (LOOP, "padding-free", 8, "sdpa", False, False, SMALL),
    "transformers, padding-free, 4 documents a pass": (LOOP, "padding-free", 4, "sdpa", False, False, SMALL),
    "transformers, a document a pass": (LOOP, "documents", 1, "sdpa", False, False, BOTH),
    "transformers, packed, 1 row a pass, eager attention": (LOOP, "packed", 1, "eager", False, False, SMALL),
    "transformers, a document a pass, eager attention": (LOOP, "documents", 1, "eager", False, False, SMALL),
    "transformers, packed, 1 row a pass, flex attention": (LOOP, "packed", 1, "flex_attention", False, False, SMALL),
    "transformers, packed, 1 row a pass, compiled": (LOOP, "packed", 1, "sdpa", True, False, BOTH),
    "transformers, a document a pass, compiled": (LOOP, "documents", 1, "sdpa", True, False, BOTH),
    "transformers, a document a pass, Liger": (LOOP, "documents", 1, "sdpa", False, True, SMALL),
    "loop, a document a pass": (RESPONSES, "documents", 1, "sdpa", False, False, LARGE),
    "loop, a document a pass, compiled": (RESPONSES, "documents", 1, "sdpa", True, False, LARGE),
}
# the fastest settings of each peer, and TRL at one row a pass, again with variables of glibc by which a process keeps
# what it frees; a run of ptf does that itself (ptf/compute/heap.py)
KEPT_HEAP, AS_IT_IS = ", heap kept", "as glibc has it"
HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
OF_HEAP = (
    f"*Heap kept*: with glibc's\n{' and '.join(f'`{name}={value}`' for name, value in HEAP.items())}, by which a "
    "process keeps what it frees, as one of ptf does by itself."
)
GRID |= {
    system + KEPT_HEAP: GRID[system]
    for system in (
        ONE_ROW,
        "TRL, a document a pass",
        "TRL, a document a pass, eager attention",
        "Trainer, a document a pass",
        "transformers, a document a pass",
        "transformers, a document a pass, eager attention",
        "transformers, packed, 1 row a pass, compiled",
        "transformers, a document a pass, compiled",
        "loop, a document a pass",
        "loop, a document a pass, compiled",
    )
}
LIBRARIES = ("TRL", "Trainer", "transformers")
PEERS = {
    "TRL": ("TRL",),
    "TRL, Trainer, transformers": LIBRARIES,
    "these, and a loop with the logits of responses alone": (*LIBRARIES, "loop"),
}
OURS: dict[str, dict[str, Any]] = {"ptf": {"train": {}}, "ptf, train.compile: true": {"train": {"compile": True}}}
NAMES = ("script", "form", "pass", "attention", "compile", "liger")
CELLS = OURS | {system: dict(zip(NAMES, cell, strict=False)) for system, cell in GRID.items()}
APART = {"fp32": 1e-4, "bf16": 5e-3}  # the most that losses of the same step may differ by


def documents(path: Path, vocab: int, rows: int, steps: int) -> None:
    """`lengths` and `tokens` of the documents of so many steps, in the order of their rows, and how many each row has
    (`rows`)."""
    from ptf.data.packing import pack_all
    from ptf.data.sample import Sample, length

    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(np.log(180), 1.03, 600), 8, WIDTH).astype(int)
    packed = [
        [length(a) for a in row]
        for row in pack_all([(Sample(np.zeros(n, np.int32), np.ones(n, np.float32)),) for n in drawn], WIDTH)
    ]
    # passes of 4 or 8 documents need as many as that divides
    starts = [i for i in range(len(packed) - rows) if sum(map(len, packed[i : i + rows])) % (8 if rows > 1 else 4) == 0]
    work = np.array([sum(n * n for row in packed[i : i + rows] for n in row) for i in starts])
    mean = rows * np.mean([sum(n * n for n in row) for row in packed])
    first = starts[int(np.argmin(np.abs(work - mean)))]  # rows whose attention costs what rows cost on average
    layout = packed[first : first + rows]
    lengths = np.array([n for row in layout for n in row] * steps)
    np.savez(
        path,
        lengths=lengths,
        rows=[len(row) for row in layout] * steps,
        tokens=rng.integers(0, vocab, lengths.sum()),
    )


def start(directory: Path, config: dict[str, Any], seed: int = 0, head: Literal["lm", "scalar"] = "lm") -> str:
    """Random weights that all begin with, in a directory of their own."""
    from ptf.compute.world import World
    from ptf.config.sections.model import ModelConfig
    from ptf.model import bridge
    from ptf.train.trainer import load_model

    place = directory / f"shape-{seed}"
    place.mkdir()
    of_head = (
        {"architectures": ["Qwen3ForCausalLM"]}
        if head == "lm"
        else {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "pad_token_id": PAD}
    )
    (place / "config.json").write_text(json.dumps(config | of_head))
    spec = ModelConfig(path=str(place), init="random")
    drawn, family = load_model(place, World(), spec, seed=seed, precision="fp32", head=head)
    bridge.save_hf(bridge.hf_tensors(drawn, family), place, directory / f"start-{seed}", writes=True)
    return str(directory / f"start-{seed}")


@contextlib.contextmanager
def prepared(given: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """ptf's Trainer of a run with the given weights, and the batch of every step."""
    from ptf.compute.world import joined
    from ptf.config.sections.model import ModelConfig
    from ptf.config.sections.train import TrainConfig
    from ptf.data.batch import Batch
    from ptf.data.sample import Sample
    from ptf.train.trainer import Trainer, load_model

    stored = np.load(given["documents"])
    parts = iter(np.split(stored["tokens"].astype(np.int32), np.cumsum(stored["lengths"])[:-1]))

    def sample(tokens):
        return Sample(tokens, (np.arange(len(tokens)) >= 0.4 * len(tokens)).astype(np.float32))

    rows = [[(sample(next(parts)),) for _ in range(n)] for n in stored["rows"]]
    steps = [rows[step * given["rows"] : (step + 1) * given["rows"]] for step in range(given["written"])]
    with joined("cpu", 600, threads=1) as world:
        place = Path(given["model"])
        settings = {"betas": (0.9, 0.999), "weight_decay": 0.0, **given["train"]}
        train = TrainConfig(
            steps=given["written"], lr=given["lr"], schedule="constant", precision=given["dtype"], **settings
        )
        model, _ = load_model(
            place,
            world,
            ModelConfig(path=str(place)),
            seed=0,
            precision=train.precision,
            compiled=train.compile,
            fused=train.fused,
        )
        yield Trainer(model, world, train), [Batch.of(of_step, WIDTH) for of_step in steps]


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: Trainer.step over packed sequences, as a run does it."""
    from ptf.recipes.sft.recipe import SFT

    with prepared(given) as (trainer, batches):
        weight = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
        cpu_s, tokens, losses, trained = [], [], [], []
        base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
        for step, batch in enumerate(batches):
            began = time.process_time()
            losses.append(trainer.step([batch], SFT(), step)["loss"])
            if step >= given["warmup"]:
                cpu_s.append(time.process_time() - began)
                tokens.append(sum(batch.lengths))
            trained.append(zlib.crc32(batch.targets.view(-1)[batch.trained_positions].numpy().tobytes()))
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    found = {"cpu_s": cpu_s, "tokens": tokens, "losses": losses, "trained": trained, "weight": weight}
    print(json.dumps({**found, "added_mib": peak - base}))


def round_of(
    system: str, given: dict[str, Any], script: str = "benchmarks/train_step.py", peer: str = TRL
) -> dict[str, Any]:
    """What one round in a process of its own prints; by the peers' Python, unless `system` is ptf."""
    own = system.startswith("ptf")
    command = [sys.executable, script, "--one"] if own else [str(PEER), peer]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT) if own else "",
        **(HEAP if system.endswith(KEPT_HEAP) else {}),
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


def asked_of(about: str | None, **lists: Sequence[str]) -> argparse.Namespace:
    """The options of a benchmark of other steps: lists of what is compared, dtypes and rounds. Exits where the peer's
    environment is missing."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in ({**lists, "dtypes": list(APART)}).items():
        parser.add_argument(f"--{name}", nargs="+", default=list(choices), choices=choices)
    for name, default in (("rounds", 3), ("steps", 3), ("warmup", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit(f"{sys.argv[0]} needs the peer's environment: make peers")
    return asked


def rate(one: dict[str, Any]) -> float:
    """Real tokens per CPU-second."""
    return sum(one["tokens"]) / sum(one["cpu_s"])


def settings(name: str, system: str) -> dict[str, Any]:
    """All that the rounds of a system on a model have in common; rounds of other settings count for nothing."""
    return {
        "shape": MODELS[name],
        "width": WIDTH,
        "sequences": SEQUENCES[name],
        "steps": [WARM, STEPS[name]],
        "cell": CELLS[system],
    }


def kept(name: str, dtype: str, hardware: str, code: str | None = None) -> list[dict[str, Any]]:
    """The rounds that were made of a model and a dtype on such a CPU, with today's settings and this code of ptf, or
    that of the last round: what is compared was measured by turns."""
    rows = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    found = [
        row
        for row in rows
        if (row["model"], row["dtype"], row["hardware"]) == (name, dtype, hardware)
        and row["system"] in CELLS
        and row.get("settings") == settings(name, row["system"])
    ]
    code = code or (found[-1].get("code") if found else None)
    return [row for row in found if row.get("code") == code]


def planned(name: str, dtype: str, hardware: str, rounds: int, code: str | None = None) -> str | None:
    """What comes next: every cell of the grid once, then ptf, ptf compiled and their rivals by turns."""
    rows = kept(name, dtype, hardware, code)
    made = [row["system"] for row in rows]
    if missing := [system for system in CELLS if system not in made and name in models_of(system)]:
        return missing[0]
    often = [*OURS, *rivals(rows)]
    least = min(often, key=made.count)
    return least if made.count(least) < rounds else None


def models_of(system: str) -> tuple[str, ...]:
    """The models that the grid has this cell for."""
    return BOTH if system in OURS else GRID[system][-1]


def fastest(rows: list[dict[str, Any]], peers: tuple[str, ...], heap: str) -> str:
    """Of the peers, each by its first round; of those whose name begins so, and with the heap kept or as it is."""
    first = {row["system"]: rate(row) for row in reversed(rows) if row["system"] in GRID and "refused" not in row}
    among = [
        system
        for system in first
        if system.startswith(peers) and heap == ("kept" if system.endswith(KEPT_HEAP) else AS_IT_IS)
    ]
    return max(among, key=lambda system: first[system])


def nearest(rows: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> str:
    """Of the libraries' fastest with the heap as it is and kept, the one that is nearest to ptf over all rounds."""
    return min(
        (fastest(rows, LIBRARIES, heap) for heap in (AS_IT_IS, "kept")),
        key=lambda system: ratios(found["ptf"], found[system])[0],
    )


def rivals(rows: list[dict[str, Any]]) -> list[str]:
    """The settings beside which ptf stands on the page: the fastest of `PEERS`, with their heap kept and as it is, and
    TRL at one row a pass."""
    found = [fastest(rows, peers, heap) for peers in PEERS.values() for heap in (AS_IT_IS, "kept")]
    return list(dict.fromkeys([*found, ONE_ROW]))


def assert_same(made: dict[str, Any], first: dict[str, Any], dtype: str) -> None:
    """Raise AssertionError where a round did not do what ptf's first did."""
    assert math.isclose(made["weight"], first["weight"], rel_tol=1e-9), "all start from the same weights"
    assert made["trained"] == first["trained"], "all train the same token ids in the same order"
    assert made["tokens"] == first["tokens"], "all count the same tokens"
    assert apart(made, first) <= APART[dtype], "all have the same losses"


def apart(made: dict[str, Any], first: dict[str, Any]) -> float:
    """The largest difference of the losses of a step."""
    return max(abs(a - b) for a, b in zip(made["losses"], first["losses"], strict=True))


def compared(name: str, dtype: str, rounds: int, until: float) -> None:
    """The rounds that are missing, unless the time is over. Raises AssertionError where two did not do the same."""
    from ptf.compute.provenance import code

    hardware = cpu()
    about = {"commit": commit(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware, "code": code()}
    with tempfile.TemporaryDirectory() as directory:
        path, model = Path(directory) / "documents.npz", start(Path(directory), MODELS[name])
        written = STEPS[name] + WARM
        documents(path, MODELS[name]["vocab_size"], SEQUENCES[name], written)
        given = {
            "model": model,
            "documents": str(path),
            "width": WIDTH,
            "rows": SEQUENCES[name],
            "dtype": dtype,
            "written": written,
            "warmup": WARM,
            "steps": STEPS[name],
            "lr": LR,
        }
        while (system := planned(name, dtype, hardware, rounds, about["code"])) and time.monotonic() < until:
            cell, began = CELLS[system], time.monotonic()
            made = round_of(system, given | cell, peer=cell.get("script", TRL))
            if "refused" not in made:
                made |= {"rate": round(rate(made))}
                assert_same(made, next((one for one in kept(name, dtype, hardware, about["code"])), made), dtype)
            row = {"model": name, "dtype": dtype, "system": system, **made, **about}
            print(json.dumps(row | {"wall_s": round(time.monotonic() - began)}), flush=True)
            with KEPT.open("a") as file:
                file.write(json.dumps(row | {"settings": settings(name, system)}) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=list(APART), choices=list(APART))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further round is begun")
    parser.add_argument("--anew", action="store_true", help="forget the rounds that are kept")
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/train_step.py needs the peer's environment: make peers")
    if asked.anew:
        KEPT.unlink(missing_ok=True)
    until = time.monotonic() + 60 * asked.minutes
    for name in asked.models:
        for dtype in asked.dtypes:
            compared(name, dtype, asked.rounds, until)
    write(asked.rounds)


def attention(system: str) -> str:
    """What the attention of a system computes, for the page."""
    if system in OURS:
        return "cpu_kernels, document by document"
    cell = CELLS[system]
    kind = {"sdpa": "SDPA", "eager": "eager", "flex_attention": "FlexAttention"}[cell["attention"]]
    if cell["attention"] == "flex_attention" or (cell["compile"] and cell["form"] == "documents"):
        return kind
    if cell["form"] == "documents":
        return f"{kind}, causal, no mask" if kind == "SDPA" else f"{kind}, a dense mask a document"
    whole = cell["script"] == TRL or cell["form"] == "padding-free"
    return f"{kind}, one dense mask over the whole pass" if whole else f"{kind}, a dense mask a row"


def spread(rounds: list[dict[str, Any]]) -> str:
    rates = [rate(one) for one in rounds]
    return f"{median(rates):,.0f}" + (f" ({min(rates):,.0f} – {max(rates):,.0f})" if len(rates) > 1 else "")


def ratios(ptf: list[dict[str, Any]], peer: list[dict[str, Any]]) -> tuple[float, str]:
    """The median of the rounds' ratios, and it with their range."""
    found = [rate(a) / rate(b) for a, b in zip(ptf, peer, strict=False)]
    return median(found), f"**{median(found):.2f}** ({min(found):.2f} – {max(found):.2f})"


def grid_lines(title: str, found: dict[str, list[dict[str, Any]]], best: str) -> list[str]:
    """Every cell's first round, beside ptf's."""
    lines = []
    for system, (one, *_) in found.items():
        names = f"| {title} | {system}{' (the best)' if system == best else ''} | {attention(system)} |"
        if "refused" in one:
            lines.append(f"{names} refused: {one['refused'].replace('|', '/')} | | | {one['hardware']} |")
        else:
            share = rate(one) / rate(found["ptf"][0])
            lines.append(f"{names} {spread([one])} | {share:.2f} | {one['added_mib']:,.0f} | {one['hardware']} |")
    return lines


def beside(title: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """ptf beside the fastest setting of each of `PEERS`, with their heap as it is and kept."""
    rows, lines = [row for of in found.values() for row in of], []
    for name, peers in PEERS.items():
        if not any(system.startswith(peers[-1]) for system in found):
            continue  # the grid has no loop for a small vocabulary
        for heap in (AS_IT_IS, "kept"):
            best = fastest(rows, peers, heap)
            ours = " | ".join(ratios(found[system], found[best])[1] for system in OURS)
            lines.append(f"| {title} | {name} | {heap} | {best.removesuffix(KEPT_HEAP)} | {ours} |")
    return lines


def beside_row(title: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """ptf beside TRL with one packed row a pass: rates and memory."""
    ptf, row = found["ptf"], found[ONE_ROW]
    ours, theirs = (median(one["added_mib"] for one in of) for of in (ptf, row))
    return f"| {title} | {ratios(ptf, row)[1]} | {ours:,.0f} / {theirs:,.0f} = {ours / theirs:.2f} |"


def write(rounds: int) -> None:
    """The page, of the rounds that are kept."""
    stored = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    every = [
        (name, dtype, hardware)
        for name in MODELS
        for dtype in APART
        for hardware in dict.fromkeys(row["hardware"] for row in stored)
        if kept(name, dtype, hardware)
    ]
    order = [key for key in every if planned(*key, rounds=1) is None]  # only beside all cells is the fastest known
    table, grid, by_heap, by_row, slower, larger, unfinished, dates = [], [], [], [], [], [], [], set()
    for key in order:
        rows, title = kept(*key), f"{key[0]} | {key[1]}"
        found = {system: [row for row in rows if row["system"] == system] for system in CELLS}
        found = {system: of for system, of in found.items() if of}
        best = nearest(rows, found)
        dates |= {row["date"] for row in rows}
        measured = f"{key[2]}, {', '.join(sorted({row['commit'] for row in rows}))}"
        if planned(*key, rounds):
            unfinished.append(" in ".join(key[:2]))
        added = {system: median(one["added_mib"] for one in found[system]) for system in (*OURS, best)}
        most = max(apart(one, found["ptf"][0]) for of in found.values() for one in of if "refused" not in one)
        columns = [title]
        for system in OURS:
            factor, ratio = ratios(found[system], found[best])
            columns += [spread(found[system]), ratio]
            if factor <= 1:
                slower.append(f"{' in '.join(key[:2])}, {best} is {1 / factor:.2f} times as fast as {system}")
        memory = f"{added['ptf']:.0f} / {added[best]:.0f} = {added['ptf'] / added[best]:.2f}"
        table.append(f"| {' | '.join(columns)} | {best} | {spread(found[best])} | {memory} | {most:.1e} | {measured} |")
        if added["ptf"] > added[best]:
            larger.append(f"{' in '.join(key[:2])} ({added['ptf']:,.0f} beside {added[best]:,.0f} MiB)")
        grid += grid_lines(title, found, best)
        by_heap += beside(title, found)
        by_row.append(beside_row(title, found))
    loses = (
        "ptf loses here: " + "; ".join(slower) + ".\n\n"
        if slower
        else "On one thread no setting of a peer is faster than ptf, of what was measured.\n\n"
    )
    if larger:
        loses += f"ptf's step adds more memory than that of the fastest peer: {', '.join(larger)}.\n\n"
    absent = [f"{name} in {dtype}" for name in MODELS for dtype in APART if (name, dtype) not in {k[:2] for k in order}]
    if left := [*unfinished, *absent]:
        loses += f"Not all rounds were made yet: {', '.join(left)}.\n\n"
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in APART.items())
    RESULTS.write_text(
        "# The SFT step beside TRL and plain transformers\n\n"
        + loses
        + "Command: `python benchmarks/train_step.py` (`make peers bench-train`)  \nHardware and commit: "
        "in each row; one thread, no GPU  \n"
        f"Date: {', '.join(sorted(dates))}\n\n"
        "Real tokens per CPU-second; of the libraries, those of the setting that is fastest here. Interleaved rounds, "
        "each in a process of\n"
        "its own; median and range. The same sequences in the same order from the same weights: "
        "packed documents of log-normal lengths\n"
        "(median 180, p99 about 2,000), the first 40 % prompt, sequences of 2,048; fused AdamW, clip 1. "
        "The script asserts that all start\n"
        "from the same weights, train the same token ids in the same order and count the same tokens, "
        f"and that the losses of every step\nagree (to {bounds}); the largest difference of any stands in the table. "
        "`small4`: Qwen3 shape, width 256,\n"
        f"4 layers, {HEADS}, vocabulary 4,096, {SEQUENCES['small4']} sequences a step; `bigvocab`: vocabulary "
        f"151,936, tied,\n{SEQUENCES['bigvocab']} sequence a step. TRL: SFTTrainer, whose head makes no full "
        "logits; Trainer: transformers' own; transformers: a loop with the\n"
        "model's own loss over full logits, those of prompts too; loop, for a large vocabulary: that with the logits "
        "of responses\nalone; versions in `benchmarks/requirements-peers.txt`; "
        "bf16 is autocast over weights of fp32 for all.\nA step has the same sequences in every cell; what a pass "
        f"does not hold is accumulated. {OF_HEAP}\n"
        "MiB: resident memory beyond that before the first step; in a heap that is "
        "kept, what the start has freed is there before.\n"
        "ptf: its defaults (`train.compile` is off on a\nCPU), and with "
        "`train.compile: true`; all sequences of a step in one pass. "
        f"{WARM} steps of the same\nshapes come before the timed one.\n"
        "These ratios are a CPU's: on a GPU with flash attention a mask costs the peers nothing.\n\n"
        "| model | dtype | ptf | of the peer's | compiled | of the peer's | fastest peer | its tokens per CPU-second "
        "| MiB that the step adds | losses apart | CPU, commit |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(table) + "\n\n"
        "Beside TRL alone, beside all libraries, and beside these and a loop over transformers' model that makes the "
        "logits of responses\nalone (`logits_to_keep`), with the peers' heap as it is and kept, in the same rounds:\n\n"
        "| model | dtype | peers | their heap | fastest | ptf / it | compiled / it |\n|---|---|---|---|---|---|---|\n"
        + "\n".join(by_heap)
        + "\n\nBeside TRL, packed, 1 row a pass, with the heap as it is, in the same rounds:\n\n"
        "| model | dtype | ptf / it | MiB that the step adds, beside that |\n|---|---|---|---|\n"
        + "\n".join(by_row)
        + "\n\n"
        "All settings, one round each, beside ptf's first; what a library refuses stands here in its own "
        "words:\n\n"
        "| model | dtype | system | attention | tokens per CPU-second | of ptf's | MiB added | CPU |\n"
        "|---|---|---|---|---|---|---|---|\n" + "\n".join(grid) + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
