"""The SFT step as a loop over plain transformers, timed: a peer of benchmarks/train_step.py,
run by the Python of requirements-peers.txt.

Reads a cell of the grid (sft_cell.py) and prints one JSON line. The model makes the logits of all positions, or of
those that hf_responses.py keeps; the loss is its own. A pass is so many packed sequences, whose documents transformers
tells apart by their positions (a dense mask in each sequence), documents end to end in one sequence, or one document,
without a mask.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from sft_cell import Memory, documents_of, laid_out, model_of, printed, trained, units_of, weight_of
from torch import Tensor


def measured(
    given: dict[str, Any], logits_of: Callable[[dict[str, Tensor]], dict[str, Any]] = lambda one: one
) -> dict[str, Any]:
    documents, rows = documents_of(given["documents"])
    model = model_of(given)
    weight = weight_of(model)
    if given["liger"]:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    run = torch.compile(model, dynamic=True) if given["compile"] else model
    model.train()
    memory, cpu_s, tokens, losses, ids = Memory(), [], [], [], []
    for step in range(given["steps"] + given["warmup"]):
        mine = units_of(given, rows[step * given["rows"] : (step + 1) * given["rows"]])
        passes = [
            laid_out(given, mine[at : at + given["pass"]], documents) for at in range(0, len(mine), given["pass"])
        ]
        began = time.process_time()
        count = sum(int((one["labels"] != -100).sum()) for one in passes)
        loss = 0.0
        for one in passes:
            with torch.autocast("cpu", torch.bfloat16) if given["dtype"] == "bf16" else nullcontext():
                made = run(**logits_of(one), use_cache=False, num_items_in_batch=count).loss
            made.backward()
            loss += float(made.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= given["warmup"]:
            cpu_s.append(time.process_time() - began)
            tokens.append(sum(len(documents[i]) for unit in mine for i in unit))
        losses.append(loss)
        ids.append(0)
        for one in passes:
            ids[-1] = trained(one["labels"], ids[-1])
    return {
        "cpu_s": cpu_s,
        "tokens": tokens,
        "losses": losses,
        "trained": ids,
        "weight": weight,
        "added_mib": memory.added_mib(),
    }


if __name__ == "__main__":
    printed(measured)
