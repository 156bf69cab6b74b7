"""The page of benchmarks/train_step.py: ptf beside each peer's fastest setting, and every cell of the grid."""

from statistics import median
from typing import Any

import pages
from flow_runs import ROOT
from train_grid import (
    APART,
    AS_IT_IS,
    CELLS,
    HEADS,
    KEPT,
    KEPT_HEAP,
    MODELS,
    OF_HEAP,
    ONE_ROW,
    OURS,
    PEERS,
    RESULTS,
    SEQUENCES,
    TRL,
    WARM,
    apart,
    fastest,
    kept,
    nearest,
    planned,
    rate,
    ratios,
)


def write(rounds: int) -> None:
    """The page, of the rounds that are kept."""
    stored = pages.kept(KEPT)
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
            columns += [pages.spread([*map(rate, found[system])]), ratio]
            if factor <= 1:
                slower.append(f"{' in '.join(key[:2])}, {best} is {1 / factor:.2f} times as fast as {system}")
        memory = f"{added['ptf']:.0f} / {added[best]:.0f} = {added['ptf'] / added[best]:.2f}"
        theirs = pages.spread([*map(rate, found[best])])
        table.append(f"| {' | '.join(columns)} | {best} | {theirs} | {memory} | {most:.1e} | {measured} |")
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
        "Real tokens per CPU-second; of the libraries, those of the setting that is nearest to ptf over all rounds, of "
        "the two that are fastest in\nthe first round, with the heap as it is and kept. Interleaved rounds, each in a "
        "process of its own; median and range. The same sequences in the same order from the same weights: "
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


def attention(system: str) -> str:
    """What the attention of a system computes, for the page."""
    if system in OURS:
        return "SDPA, document by document"
    cell = CELLS[system]
    kind = {"sdpa": "SDPA", "eager": "eager", "flex_attention": "FlexAttention"}[cell["attention"]]
    if cell["attention"] == "flex_attention" or (cell["compile"] and cell["form"] == "documents"):
        return kind
    if cell["form"] == "documents":
        return f"{kind}, causal, no mask" if kind == "SDPA" else f"{kind}, a dense mask a document"
    whole = cell["script"] == TRL or cell["form"] == "padding-free"
    return f"{kind}, one dense mask over the whole pass" if whole else f"{kind}, a dense mask a row"


def grid_lines(title: str, found: dict[str, list[dict[str, Any]]], best: str) -> list[str]:
    """Every cell's first round, beside ptf's."""
    lines = []
    for system, (one, *_) in found.items():
        names = f"| {title} | {system}{' (the nearest)' if system == best else ''} | {attention(system)} |"
        if "refused" in one:
            lines.append(f"{names} refused: {one['refused'].replace('|', '/')} | | | {one['hardware']} |")
        else:
            share = rate(one) / rate(found["ptf"][0])
            lines.append(f"{names} {rate(one):,.0f} | {share:.2f} | {one['added_mib']:,.0f} | {one['hardware']} |")
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
