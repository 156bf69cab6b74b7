"""Sharding against one rank, on every mesh of 2 and 4 gloo ranks. Writes results/sharding.md.

    python benchmarks/sharding.py [--steps 20] [--part meshes-2 meshes-4 meshes-others fp64 recipes resume activations]

`meshes-2`, `meshes-4`: AdamW steps of dense models, with experts, and with sinks and windows, full and LoRA, on every
mesh of 2 and of 4 ranks; `meshes-others`: the same of soft-capped and of linear attention, where ranks divide
sequences. `fp64`: one step of ranks that divide sequences, where only rounding may differ, and mistakes that must show.
`recipes`: losses, metrics and gradients of every recipe on such ranks. `resume`: a checkpoint of each mesh goes on on
each other. `activations`: what such ranks keep of a layer. Prints a JSON line a case and keeps it beside the page,
which has the newest of each part; exits 1 where a bound is missed.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from commands import options
from flow_runs import commit, results_page
from pages import Row, head, keep, kept, table, today, write_page
from sharding_activations import ABOUT, activations

if TYPE_CHECKING:
    from ptf.config.sections.compute import MeshSizes

RESULTS = results_page("sharding.md")
LEDGER = RESULTS.with_suffix(".jsonl")


def meshes(size: int, steps: int, scratch: Path) -> Iterator[Row]:
    """Steps on every mesh of so many ranks."""
    from tests.model.parallel import checkpoint
    from tests.model.test_sharding import FAMILIES, MESHES

    models = {family: checkpoint(scratch / family, family) for family in FAMILIES}
    yield from trained(models, MESHES[size], steps, scratch)


def others(steps: int, scratch: Path) -> Iterator[Row]:
    """Steps of further families where ranks divide sequences."""
    from tests.model.context import made
    from tests.model.test_sharding import MESHES

    models = {family: made(scratch, family) for family in ("gemma2", "qwen3_5_text")}
    shapes = [mesh for each in MESHES.values() for mesh in each if mesh.context > 1 and mesh.tensor == 1]
    yield from trained(models, shapes, steps, scratch)


def trained(models: Mapping[str, str], shapes: "Sequence[MeshSizes]", steps: int, scratch: Path) -> Iterator[Row]:
    """Each model on each mesh, full and LoRA."""
    from tests.model.parallel import Case, difference, on_ranks, train
    from tests.model.test_sharding import BOUND

    kinds = [(family, lora) for family in models for lora in (False, True)]
    alone = {(family, lora): train(Case(models[family], lora=lora, steps=steps)) for family, lora in kinds}
    for number, mesh in enumerate(shapes):
        cases = [Case(models[family], mesh, lora, steps) for family, lora in kinds]
        found = on_ranks(mesh.ranks, cases, scratch / f"ranks{number}")
        for (family, lora), one in zip(kinds, found, strict=True):
            loss, gradients = difference(alone[family, lora], one)
            what = f"{family}, {'LoRA' if lora else 'full'}"
            yield {"case": what, "mesh": str(mesh), "loss": loss, "gradients": gradients, "bound": BOUND}


def fp64(steps: int, scratch: Path) -> Iterator[Row]:
    """One step in fp64."""
    from tests.model.context import EXACT, FAMILIES, LAYOUTS, MISTAKES, PREFIX, exact, made
    from tests.model.ranks import on_processes

    models = {family: made(scratch, family) for family in FAMILIES}
    for size in (2, 4):
        found, *_ = on_processes(size, partial(exact, models, size, [*LAYOUTS, PREFIX]), scratch)
        for (family, name), (loss, gradients) in found.items():
            bound = {"least": 1e-3} if name in MISTAKES else {"bound": EXACT}
            what = f"{'mistake: ' if name in MISTAKES else ''}{name}; {family}"
            yield {"case": what, "mesh": f"context {size}", "loss": loss, "gradients": gradients, **bound}


def recipes(steps: int, scratch: Path) -> Iterator[Row]:
    """One pass of every recipe; the loss stands for every metric."""
    from ptf.config.sections.compute import MeshSizes
    from tests.model.parallel import checkpoint
    from tests.model.ranks import on_processes
    from tests.recipes.on_meshes import recipes_on_rank

    directory = checkpoint(scratch / "recipes", "qwen3")
    for size in (2, 4):
        found, *_ = on_processes(size, partial(recipes_on_rank, directory, MeshSizes(context=size)), scratch)
        for name, (loss, gradients, same) in found.items():
            loss = loss if same else float("inf")  # another denominator
            yield {"case": name, "mesh": f"context {size}", "loss": loss, "gradients": gradients, "bound": 1e-6}


def resume(steps: int, scratch: Path) -> Iterator[Row]:
    """Two steps, a checkpoint, and a third step on another mesh."""
    from ptf.config.sections.compute import MeshSizes
    from tests.model.parallel import checkpoint
    from tests.model.ranks import on_processes
    from tests.recipes.on_meshes import resumed_on_rank

    directory = checkpoint(scratch / "resume", "qwen3")
    shapes = [
        MeshSizes(shard=4),
        MeshSizes(context=4),
        MeshSizes(shard=2, context=2),
        MeshSizes(context=2, tensor=2),
        MeshSizes(shard=2, tensor=2),
        MeshSizes(replicate=2, shard=2),
    ]
    found, *_ = on_processes(4, partial(resumed_on_rank, directory, shapes, str(scratch / "checkpoints")), scratch)
    for (before, after), apart in found.items():
        yield {"case": f"from {before}", "mesh": after, "loss": apart, "gradients": apart, "bound": 1e-6}


STEPS = (
    "AdamW (lr 2e-5) on four packed micro-batches each, fp32. *Loss*: largest relative difference of a step's\n"
    "loss from one rank's. *Gradients*: largest over every fourth step and the last, global norm of the\n"
    "difference over the norm. At a learning rate of 1e-3 the weights themselves part ways by rounding, and the\n"
    "gradients with them (2e-6 by step 20)."
)
PARTS: dict[str, tuple[Callable[[int, Path], Iterator[Row]], str]] = {
    "meshes-2": (partial(meshes, 2), STEPS),
    "meshes-4": (partial(meshes, 4), STEPS),
    "meshes-others": (others, STEPS),
    "fp64": (
        fp64,
        "One step in fp64 of ranks that divide sequences: documents over every cut, one document, short ones, two\n"
        "sequences, lengths that the ranks do not divide, a shared prefix over a cut. A mistake that was put in must\n"
        "show in the gradients, by 1e-3.",
    ),
    "recipes": (
        recipes,
        "One pass of every recipe in fp32. *Loss*: the largest relative difference of a metric; that of a margin, the\n"
        "difference of two log-probs, is relative to 1 at least.",
    ),
    "resume": (
        resume,
        "Two steps on one mesh, a checkpoint, and two on another; the larger of loss and gradients of the fourth\n"
        "step, beside one rank's.",
    ),
    "activations": (activations, ABOUT),
}


def missed(row: Row) -> bool:
    """Whether a case is beyond its bound, or a mistake did not show."""
    if "share" in row:
        return not row["share"] <= row["bound"]
    if "least" in row:
        return not row["gradients"] > row["least"]
    return not (row["loss"] <= row["bound"] and row["gradients"] <= row["bound"])


def main() -> int:
    asked = options(__doc__, steps=20, part=([*PARTS], "what to measure"))
    import torch

    torch.set_num_threads(1)
    found = [row for row in kept(LEDGER) if row["part"] not in asked.part]
    LEDGER.unlink(missing_ok=True)
    for row in found:
        keep(LEDGER, row)
    for part in asked.part:
        with tempfile.TemporaryDirectory() as scratch:
            for row in PARTS[part][0](asked.steps, Path(scratch)):
                steps = {"steps": asked.steps} if part.startswith("meshes") else {}
                found.append({"part": part, **row, **steps, "commit": commit(), "date": today()})
                keep(LEDGER, found[-1])
                print(json.dumps(found[-1]), flush=True)
    text = [head("Sharded training against one rank", f", gloo, torch {torch.__version__}")]
    for part, (_, about) in PARTS.items():
        if rows := [row for row in found if row["part"] == part]:
            bounds = sorted({row["bound"] for row in rows if "bound" in row})
            steps = f"{rows[0]['steps']} steps of " if "steps" in rows[0] else ""
            of = ", ".join(dict.fromkeys(f"{row['date']}, commit {row['commit']}" for row in rows))
            text.append(f"## {part}\n\n{steps}{about}\nBound: {', '.join(f'{b:g}' for b in bounds)}. Measured: {of}.\n")
            if part == "activations":
                shares = [[r["case"], r["mesh"], f"{r['share']:.3f}", f"≤ {r['bound']:g}"] for r in rows]
                text.append(table("recomputation | mesh | share of one rank's | bound", shares) + "\n")
                continue
            cells = [[r["case"], r["mesh"], f"{r['loss']:.1e}", f"{r['gradients']:.1e}"] for r in rows]
            text.append(table("case | mesh | loss | gradients", cells) + "\n")
    wrong = [f"{row['part']}: {row['case']}, {row['mesh']}" for row in found if missed(row)]
    return write_page(RESULTS, text[0], text[1:], wrong)


if __name__ == "__main__":
    sys.exit(main())
