"""The SFT step beside TRL, transformers' Trainer and plain transformers, each at the fastest of its settings: real
tokens per CPU-second of one thread, and the memory that a step adds, on the same sequences from the same weights.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/train_step.py [--models small4 bigvocab] [--dtypes fp32 bf16] [--rounds 3] [--minutes 7] [--anew]

First one round of every cell of the grid (train_grid.py): ptf, ptf compiled, and all settings of the peers. A setting
that a library refuses is kept with the library's own words. Then further rounds of ptf, of ptf compiled and of the
settings that ptf is set beside (`rivals`), one after the other (A, B, C, A, B, C, …). Every round must start from the
same weights, train the same token ids in the same order, count the same tokens and have the same losses. Documents:
log-normal lengths (median 180, p99 about 2,000, at most 2,048), the first 40 % of each is prompt, packed into sequences
of 2,048; every step has documents of the same lengths with other tokens. Keeps every round with its settings in
results/train_step.jsonl, where the next call with the same code of ptf on a CPU of the same name goes on, and writes
results/train_step.md (train_page.py) from the rounds of today's settings and the newest code.
"""

import argparse
import contextlib
import json
import math
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import train_grid as grid
from commands import PEER, ROOT, last_line, need_peer, options
from pages import here, keep
from train_grid import APART, KEPT, LR, MODELS, PAD, TRL, WIDTH, apart, rate
from train_page import write


def documents(path: Path, vocab: int, rows: int, steps: int, width: int = WIDTH) -> None:
    """`lengths` and `tokens` of the documents of so many steps, in the order of their rows, and how many each row has
    (`rows`)."""
    from ptf.data.document import Document, length
    from ptf.data.packing import pack_all

    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(np.log(180), 1.03, 600), 8, width).astype(int)
    packed = [
        [length(a) for a in row]
        for row in pack_all([(Document(np.zeros(n, np.int32), np.ones(n, np.float32)),) for n in drawn], width)
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
    from ptf.model import model_writer
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
    drawn = load_model(place, World(), spec, seed=seed, precision="fp32", head=head)
    model_writer.save_hf(drawn.hf_tensors(), place, directory / f"start-{seed}", writes=True)
    return str(directory / f"start-{seed}")


@contextlib.contextmanager
def prepared(given: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """ptf's Trainer of a run with the given weights, and the batch of every step."""
    from ptf.compute.world import joined
    from ptf.config.sections.model import ModelConfig
    from ptf.config.sections.train import TrainConfig
    from ptf.data.batch import Batch
    from ptf.data.document import Document
    from ptf.train.trainer import Trainer, load_model

    stored = np.load(given["documents"])
    parts = iter(np.split(stored["tokens"].astype(np.int32), np.cumsum(stored["lengths"])[:-1]))

    def sample(tokens):
        return Document(tokens, (np.arange(len(tokens)) >= 0.4 * len(tokens)).astype(np.float32))

    rows = [[(sample(next(parts)),) for _ in range(n)] for n in stored["rows"]]
    steps = [rows[step * given["rows"] : (step + 1) * given["rows"]] for step in range(given["written"])]
    with joined("cpu", 600, threads=1) as world:
        place = Path(given["model"])
        settings = {"betas": (0.9, 0.999), "weight_decay": 0.0, **given["train"]}
        train = TrainConfig(
            steps=given["written"], lr=given["lr"], schedule="constant", precision=given["dtype"], **settings
        )
        model = load_model(
            place,
            world,
            ModelConfig(path=str(place)),
            seed=0,
            precision=train.precision,
            compiled=train.compile,
            fused=train.fused,
        )
        yield Trainer(model, world, train), [Batch.of(of_step, given["width"]) for of_step in steps]


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: Trainer.step over packed sequences, as a run does it."""
    from ptf.recipes.sft.config import SFTConfig
    from ptf.recipes.sft.recipe import SFT

    with prepared(given) as (trainer, batches):
        weight = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
        cpu_s, tokens, losses, trained = [], [], [], []
        base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here
        for step, batch in enumerate(batches):
            began = time.process_time()
            losses.append(trainer.step([batch], SFT(SFTConfig()), step)["loss"])
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
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT) if own else ""}
    heap = grid.HEAP if system.endswith(grid.KEPT_HEAP) else {}
    return last_line([*command, json.dumps(given)], system, **environment, **heap)


def asked_of(about: str | None, **lists: Sequence[str]) -> argparse.Namespace:
    """The options of a benchmark of other steps: lists of what is compared, dtypes and rounds. Exits where the peer's
    environment is missing."""
    asked = options(about, **lists, dtypes=APART, rounds=3, steps=3, warmup=1)
    need_peer()
    return asked


def assert_same(made: dict[str, Any], first: dict[str, Any], dtype: str) -> None:
    """Raise AssertionError where a round did not do what ptf's first did."""
    assert math.isclose(made["weight"], first["weight"], rel_tol=1e-9), "all start from the same weights"
    assert made["trained"] == first["trained"], "all train the same token ids in the same order"
    assert made["tokens"] == first["tokens"], "all count the same tokens"
    assert all(map(math.isfinite, made["losses"])), "no loss is infinite or no number"
    assert apart(made, first) <= APART[dtype], "all have the same losses"


def compared(name: str, dtype: str, rounds: int, until: float) -> None:
    """The rounds that are missing, unless the time is over. Raises AssertionError where two did not do the same."""
    from ptf.compute.provenance import code

    about = {**here(), "code": code()}
    hardware, own = about["hardware"], about["code"]
    with tempfile.TemporaryDirectory() as directory:
        path, model = Path(directory) / "documents.npz", start(Path(directory), MODELS[name])
        written = grid.STEPS[name] + grid.WARM
        documents(path, MODELS[name]["vocab_size"], grid.SEQUENCES[name], written)
        given = {
            "model": model,
            "documents": str(path),
            "width": WIDTH,
            "rows": grid.SEQUENCES[name],
            "dtype": dtype,
            "written": written,
            "warmup": grid.WARM,
            "steps": grid.STEPS[name],
            "lr": LR,
        }
        while (system := grid.planned(name, dtype, hardware, rounds, own)) and time.monotonic() < until:
            cell, began = grid.CELLS[system], time.monotonic()
            made = round_of(system, given | cell, peer=str(cell.get("script", TRL)))
            if "refused" not in made:
                made |= {"rate": round(rate(made))}
                first = grid.kept(name, dtype, hardware, own)[:1] or [made]
                assert_same(made, first[0], dtype)
            row = {"model": name, "dtype": dtype, "system": system, **made, **about}
            print(json.dumps(row | {"wall_s": round(time.monotonic() - began)}), flush=True)
            keep(KEPT, row | {"settings": grid.settings(name, system)})


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    asked = options(
        __doc__,
        models=MODELS,
        dtypes=APART,
        rounds=3,
        minutes=(float("inf"), "after which no further round is begun"),
        anew=(False, "forget the rounds that are kept"),
    )
    need_peer()
    if asked.anew:
        KEPT.unlink(missing_ok=True)
    until = time.monotonic() + 60 * asked.minutes
    for name in asked.models:
        for dtype in asked.dtypes:
            compared(name, dtype, asked.rounds, until)
    write(asked.rounds)


if __name__ == "__main__":
    main()
