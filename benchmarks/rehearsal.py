"""A training step on a pretend GPU, at published sizes: how often the host waits for the device, and how many variants
of attention are compiled. Writes results/rehearsal.md.

    python benchmarks/rehearsal.py

Needs a C++ compiler. Exits 1 if a step waits more than twice, if a variant is not compiled before the first step, or if
ranks that divide the sequences sum something in no fixed order that one rank does not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MOST = 2
OTHERS = ("Qwen3-4B", "Qwen3-8B", "Gemma-3-4B", "Llama-3.2-1B", "gpt-oss-20b", "Qwen3-30B-A3B")


def main() -> int:
    # here, because the pretend GPU's process imports this module, and must not import torch with it
    from benchmarks.flow_runs import commit, results_page
    from benchmarks.pages import table, today, write_page
    from ptf.config.sections.compute import MeshSizes
    from tests.gpu_rehearsal.pretend import PretendCuda, build
    from tests.gpu_rehearsal.step import RECIPES, host_syncs, on_ranks, variants

    cases = [*(("Qwen3-0.6B", recipe) for recipe in RECIPES), *((shape, "sft") for shape in OTHERS)]
    pretend, missed = PretendCuda(build()), []
    rows, of_ranks = [], []
    try:
        for recomputed in ("none", "block", "offload", "selective"):
            for sizes in (MeshSizes(), MeshSizes(context=2), MeshSizes(context=2, tensor=2)):
                counts, sums = pretend(on_ranks, sizes, recomputed)
                of_ranks.append([sizes, recomputed, sum(counts.values()), sum(sums.values())])
                if of_ranks[-1][2:] != [MOST, of_ranks[0][3]]:
                    missed.append(f"{sizes}, {recomputed}")
                print(*of_ranks[-1], flush=True)
        for shape, recipe in cases:
            waits = sum(pretend(host_syncs, shape, recipe).values())
            warmed, used = map(set, pretend(variants, shape, recipe))
            if waits > MOST or not used <= warmed:
                missed.append(f"{shape}, {recipe}")
            rows.append([shape, recipe, waits, len(used), len(used & warmed)])
            print(*rows[-1], flush=True)
    finally:
        pretend.close()
    about = (
        "# A step on a pretend GPU\n\n"
        "Command: `python benchmarks/rehearsal.py`  \n"
        f"Date: {today()}; commit {commit()}\n\n"
        "ptf's Trainer and recipes, in bf16, on fake tensors of a device `cuda` that computes nothing; published\n"
        "sizes, two layers of each, two passes a step. The host waits for the device to fetch the metrics and the\n"
        "norm of the gradient. A variant is a call of FlexAttention that differs in shapes, strides, dtype, window,\n"
        "or in what has a gradient; those of a step and a validation after it are counted, of frozen models too.\n"
        "Bytes a parameter are on [plans.md](plans.md), upper bounds of MFU on [roofline.md](roofline.md).\n\n"
    )
    names = "model | recipe | waits of the host in a step | variants of attention | of them compiled before step 1"
    names_of_ranks = "ranks | recomputation | waits of the host in a step | sums in no fixed order"
    ranks = (
        "\nQwen3-0.6B and `sft` with FSDP, as the first of the ranks sees it, by what is recomputed. A sum in no\n"
        "fixed order adds values wherever an index says: one rank has those of the documents' losses and counts,\n"
        "which are metrics, and ranks that divide the sequences may add none.\n"
    )
    lines = [table(names, rows), ranks, table(names_of_ranks, of_ranks)]
    return write_page(results_page("rehearsal.md"), about, lines, missed)


if __name__ == "__main__":
    sys.exit(main())
