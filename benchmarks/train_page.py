"""The page of benchmarks/train_step.py: ptf beside each peer's fastest setting, and every cell of the grid."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import pages
import train_grid as grid
from flow_runs import ROOT

Found = dict[str, list[dict[str, Any]]]  # system → rounds


def write(rounds: int) -> None:
    stored = pages.kept(grid.KEPT)
    every = [
        (name, dtype, hardware)
        for name in grid.MODELS
        for dtype in grid.APART
        for hardware in dict.fromkeys(row["hardware"] for row in stored)
        if grid.kept(name, dtype, hardware)
    ]
    order = [key for key in every if grid.planned(*key, rounds=1) is None]  # only beside all cells is the fastest known
    closest, every_cell, by_heap, by_row, slower, larger, unfinished, dates = [], [], [], [], [], [], [], set()
    for key in order:
        rows = grid.kept(*key)
        found = {system: [row for row in rows if row["system"] == system] for system in grid.CELLS}
        found = {system: of for system, of in found.items() if of}
        best = grid.nearest(rows, found)
        dates |= {row["date"] for row in rows}
        measured = f"{key[2]}, {', '.join(sorted({row['commit'] for row in rows}))}"
        if grid.planned(*key, rounds):
            unfinished.append(" in ".join(key[:2]))
        added = {system: median(one["added_mib"] for one in found[system]) for system in (*grid.OURS, best)}
        most = max(grid.apart(one, found["ptf"][0]) for of in found.values() for one in of if "refused" not in one)
        columns = [*key[:2]]
        for system in grid.OURS:
            factor, ratio = grid.ratios(found[system], found[best])
            columns += [pages.spread([*map(grid.rate, found[system])]), ratio]
            if factor <= 1:
                slower.append(f"{' in '.join(key[:2])}, {best} is {1 / factor:.2f} times as fast as {system}")
        memory = f"{added['ptf']:.0f} / {added[best]:.0f} = {added['ptf'] / added[best]:.2f}"
        theirs = pages.spread([*map(grid.rate, found[best])])
        closest.append([*columns, best, theirs, memory, f"{most:.1e}", measured])
        if added["ptf"] > added[best]:
            larger.append(f"{' in '.join(key[:2])} ({added['ptf']:,.0f} beside {added[best]:,.0f} MiB)")
        every_cell += grid_lines(key, found, best)
        by_heap += beside(key, found)
        by_row.append(beside_row(key, found))
    loses = (
        "ptf loses here: " + "; ".join(slower) + ".\n\n"
        if slower
        else "On one thread no setting of a peer is faster than ptf, of what was measured.\n\n"
    )
    if larger:
        loses += f"ptf's step adds more memory than that of the fastest peer: {', '.join(larger)}.\n\n"
    ordered = {key[:2] for key in order}
    absent = [f"{name} in {of}" for name in grid.MODELS for of in grid.APART if (name, of) not in ordered]
    if left := [*unfinished, *absent]:
        loses += f"Not all rounds were made yet: {', '.join(left)}.\n\n"
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in grid.APART.items())
    grid.RESULTS.write_text(
        "# The SFT step beside TRL and plain transformers\n\n"
        + loses
        + "Command: `python benchmarks/train_step.py` (`make peers bench-train`)  \nHardware and commit: "
        "in each row; one thread, no GPU  \n"
        f"Date: {', '.join(sorted(dates))}\n\n"
        "Real tokens per CPU-second; of the libraries, those of the setting that is nearest to ptf over all rounds, of "
        "the two that are fastest in\nthe first round, with the heap as it is and kept. Interleaved rounds, each in a "
        "process of its own; median and range. The same sequences in the same order from the same weights: "
        "packed documents of log-normal lengths\n"
        "(median 180, p99 about 2,000), the first 40 % prompt, sequences of 2,048; fused AdamW, clip 1. "
        "The script asserts that all start\n"
        "from the same weights, train the same token ids in the same order and count the same tokens, "
        f"and that the losses of every step\nagree (to {bounds}); the largest difference of any stands in the table. "
        "`small4`: Qwen3 shape, width 256,\n"
        f"4 layers, {grid.HEADS}, vocabulary 4,096, {grid.SEQUENCES['small4']} sequences a step; `bigvocab`: "
        f"vocabulary 151,936, tied,\n{grid.SEQUENCES['bigvocab']} sequence a step. TRL: SFTTrainer, whose head makes "
        "no full logits; Trainer: transformers' own; transformers: a loop with the\n"
        "model's own loss over full logits, those of prompts too; loop, for a large vocabulary: that with the logits "
        "of responses\nalone; versions in `benchmarks/requirements-peers.txt`; "
        "bf16 is autocast over weights of fp32 for all.\nA step has the same sequences in every cell; what a pass "
        f"does not hold is accumulated. {grid.OF_HEAP}\n"
        "MiB: resident memory beyond that before the first step; in a heap that is "
        "kept, what the start has freed is there before.\n"
        "ptf: its defaults (`train.compile` is off on a\nCPU), and with "
        "`train.compile: true`; all sequences of a step in one pass. "
        f"{grid.WARM} steps of the same\nshapes come before the timed one.\n"
        "These ratios are a CPU's: on a GPU with flash attention a mask costs the peers nothing.\n\n"
        + pages.table(
            "model | dtype | ptf | of the peer's | compiled | of the peer's | fastest peer | its tokens per CPU-second "
            "| MiB that the step adds | losses apart | CPU, commit",
            closest,
        )
        + "\n\nBeside TRL alone, beside all libraries, and beside these and a loop over transformers' model that "
        "makes the logits of responses\nalone (`logits_to_keep`), with the peers' heap as it is and kept, "
        "in the same rounds:\n\n"
        + pages.table("model | dtype | peers | their heap | fastest | ptf / it | compiled / it", by_heap)
        + "\n\nBeside TRL, packed, 1 row a pass, with the heap as it is, in the same rounds:\n\n"
        + pages.table("model | dtype | ptf / it | MiB that the step adds, beside that", by_row)
        + "\n\nAll settings, one round each, beside ptf's first; what a library refuses stands here in its own "
        "words:\n\n"
        + pages.table(
            "model | dtype | system | attention | tokens per CPU-second | of ptf's | MiB added | CPU", every_cell
        )
        + "\n"
    )
    print(f"wrote {grid.RESULTS.relative_to(ROOT)}")


def attention(system: str) -> str:
    """What the attention of a system computes, for the page."""
    if system in grid.OURS:
        return "SDPA, document by document"
    cell = grid.CELLS[system]
    kind = {"sdpa": "SDPA", "eager": "eager", "flex_attention": "FlexAttention"}[cell["attention"]]
    if cell["attention"] == "flex_attention" or (cell["compile"] and cell["form"] == "documents"):
        return kind
    if cell["form"] == "documents":
        return f"{kind}, causal, no mask" if kind == "SDPA" else f"{kind}, a dense mask a document"
    whole = cell["script"] == grid.TRL or cell["form"] == "padding-free"
    return f"{kind}, one dense mask over the whole pass" if whole else f"{kind}, a dense mask a row"


def grid_lines(key: Sequence[str], found: Found, best: str) -> list[list[str]]:
    """Every cell's first round, beside ptf's."""
    lines = []
    for system, (one, *_) in found.items():
        names = [*key[:2], f"{system}{' (the nearest)' if system == best else ''}", attention(system)]
        if "refused" in one:
            cells = [f"refused: {one['refused'].replace('|', '/')}", "", ""]
        else:
            share = grid.rate(one) / grid.rate(found["ptf"][0])
            cells = [f"{grid.rate(one):,.0f}", f"{share:.2f}", f"{one['added_mib']:,.0f}"]
        lines.append([*names, *cells, one["hardware"]])
    return lines


def beside(key: Sequence[str], found: Found) -> list[list[str]]:
    """ptf beside the fastest setting of each of `PEERS`, with their heap as it is and kept."""
    rows, lines = [row for of in found.values() for row in of], []
    for name, peers in grid.PEERS.items():
        if not any(system.startswith(peers[-1]) for system in found):
            continue  # the grid has no loop for a small vocabulary
        for heap in (grid.AS_IT_IS, "kept"):
            best = grid.fastest(rows, peers, heap)
            ours = [grid.ratios(found[system], found[best])[1] for system in grid.OURS]
            lines.append([*key[:2], name, heap, best.removesuffix(grid.KEPT_HEAP), *ours])
    return lines


def beside_row(key: Sequence[str], found: Found) -> list[str]:
    """ptf beside TRL with one packed row a pass: rates and memory."""
    ptf, row = found["ptf"], found[grid.ONE_ROW]
    ours, theirs = (median(one["added_mib"] for one in of) for of in (ptf, row))
    return [*key[:2], grid.ratios(ptf, row)[1], f"{ours:,.0f} / {theirs:,.0f} = {ours / theirs:.2f}"]
