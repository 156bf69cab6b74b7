"""A document of 32,768 tokens on 1, 2 and 4 CPU ranks that divide it (`compute.mesh.context_parallel_size`): losses
beside one rank's, and the memory of a rank beside the plan's. Writes results/long_document.md.

    python benchmarks/long_document.py

Exits 1 where a loss or the norm of a gradient is further from one rank's than the bound.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from commands import options
from flow_runs import results_page
from pages import head, table, write_page

TOKENS, CONTEXTS, BOUND = 32_768, (1, 2, 4), 2e-6
ROWS = [[TOKENS], [20_000, TOKENS - 20_000], [11_111, TOKENS - 11_111]]  # a step each: lengths of its documents
# MLPs far wider than the model, so that attention takes minutes and activations more than the interpreter
SHAPE = {"hidden_size": 64, "intermediate_size": 2048, "vocab_size": 512, "max_position_embeddings": TOKENS}
SHAPE |= {"use_sliding_window": False}
COLUMNS = (
    "ranks | loss of each step | it differs by | norm of the gradient by | peak of a rank, MiB | of one rank's | "
    "plan, MiB | activations | hidden states and logits | peak / plan"
)


def job_of(directory: str, contexts: int):
    """The job, whose plan is for parts that are not compiled, as here."""
    import yaml

    from ptf.config import loads
    from tests.train.live_bytes import raw_job

    train = {"precision": "fp32", "activation_checkpointing": "block", "compile": False, "global_batch_sequences": 1}
    mesh = {"mesh": {"context_parallel_size": contexts}}
    return loads(
        yaml.safe_dump(
            raw_job(Path(directory), contexts, seq_len=TOKENS, sequences=1, train={**train, "steps": 4}, compute=mesh)
        )
    )


def resident(key: str) -> int:
    """The bytes that /proc says this process has (`VmRSS`), or has had at most (`VmHWM`)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10


def train(directory: str, contexts: int) -> tuple[list[dict[str, float]], int]:
    """Train on this rank; return the metrics of each step, and the most bytes above those that are held between."""
    from ptf.compute.world import World
    from ptf.recipes import registry
    from ptf.train.trainer import Trainer, load_model
    from tests.model.ranks import world_of
    from tests.tiny import packed

    job = job_of(directory, contexts)
    world = world_of(job.compute.mesh.sizes(contexts)) if contexts > 1 else World()
    model = load_model(Path(directory), world, job.model, seed=0, precision="fp32", recomputed="block")
    trainer, recipe = Trainer(model, world, job.train), registry.build(job)
    trainer.step([packed([[200, 56]], 256)], recipe, 0)  # what a first step imports and makes, averages among it
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = resident("VmRSS")
    batches = [packed([row], TOKENS, seed=seed) for seed, row in enumerate(ROWS)]
    metrics = [trainer.step([batch], recipe, step) for step, batch in enumerate(batches, 1)]
    return metrics, resident("VmHWM") - before


def main() -> int:
    options(__doc__)
    from ptf.train.budget import budget
    from tests.model.parallel import checkpoint
    from tests.model.ranks import on_processes

    lines, missed, alone, most_alone = [], [], None, 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = checkpoint(Path(scratch) / "model", "qwen3", **SHAPE)
        for contexts in CONTEXTS:
            found = on_processes(contexts, partial(train, directory, contexts), Path(scratch))
            steps, most = found[0][0], max(peak for _, peak in found)
            alone, most_alone = alone or steps, most_alone or most
            off, of_norm = (
                max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(alone, steps, strict=True))
                for key in ("loss", "grad_norm")
            )
            missed += [f"context {contexts}: {off:.1e}"] * (max(off, of_norm) > BOUND)
            plan = budget(job_of(directory, contexts), Path(directory), contexts).memory
            planned = plan.total - plan.weights - plan.optimizer
            sizes = [f"{size / 2**20:,.0f}" for size in (planned, plan.activations, plan.logits)]
            told = ", ".join(f"{step['loss']:.7f}" for step in steps)
            apart = [f"{difference:.1e}" if contexts > 1 else "–" for difference in (off, of_norm)]
            peak, ratios = f"{most / 2**20:,.0f}", [f"{most / whole:.2f}" for whole in (most_alone, planned)]
            lines.append([contexts, told, *apart, peak, ratios[0], *sizes, ratios[1]])
            print(json.dumps(dict(zip(COLUMNS.split(" | "), lines[-1], strict=True))), flush=True)
    about = f"""\
Three steps, each on one packed row of {TOKENS:,} tokens: one document, then two rows of two documents. No document of
these ends where a rank's part does. A Qwen3 member of 2 layers, width {SHAPE["hidden_size"]}, 4 heads, 2 key-value
heads, MLPs of {SHAPE["intermediate_size"]:,}; AdamW, `activation_checkpointing: block`. Differences are those of a
step from one rank's, relative, at most; bound {BOUND:g}. A loss is a sum of fp32, which ends at about 1e-7.

*Peak*: `VmHWM` of the fullest rank, reset after a short first step, less what it had then: activations, gradients,
gathered weights, logits, without the interpreter, weights and averages. *Plan*: the same parts of `ptf plan`; what it
calls logits has the hidden states of the whole row, of which every rank has a copy. The plan counts what a fused kernel
keeps. On a CPU attention keeps more: queries, keys and values by document beside those that were exchanged. Nor does
the plan count what gloo and the allocator take, which is the larger share of a small peak.

"""
    title = head("A long document over several ranks", ", gloo, fp32, one thread a rank")
    return write_page(results_page("long_document.md"), title + about, [table(COLUMNS, lines)], missed)


if __name__ == "__main__":
    sys.exit(main())
