"""The SFT step as a loop over plain transformers, timed: a peer of benchmarks/train_step.py,
run by the Python of requirements-peers.txt.

Reads one JSON object from the command line (see trl_sft.py) and prints one JSON line. The model makes the logits of all
positions; the loss is its own. A pass is so many packed sequences, whose documents transformers tells apart by their
positions (a dense mask in each sequence), or one document, without a mask.
"""

import json
import sys
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM, logging
from trl_sft import Memory, documents_of, labels_of, packed


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    documents, rows = documents_of(given["documents"])
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    memory, cpu_s, tokens, losses = Memory(), [], [], []
    for step in range(given["steps"] + given["warmup"]):
        mine = rows[step * given["rows"] : (step + 1) * given["rows"]]
        if given["packed"]:
            passes = [packed(mine[i : i + given["pass"]], documents) for i in range(0, len(mine), given["pass"])]
        else:
            passes = [
                {"input_ids": documents[i][None], "labels": labels_of(documents[i])[None]} for row in mine for i in row
            ]
        began = time.process_time()
        trained = sum(int((one["labels"] != -100).sum()) for one in passes)
        loss = 0.0
        for one in passes:
            with torch.autocast("cpu", torch.bfloat16) if given["dtype"] == "bf16" else nullcontext():
                made = model(**one, use_cache=False, num_items_in_batch=trained).loss
            made.backward()
            loss += float(made.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= given["warmup"]:
            cpu_s.append(time.process_time() - began)
            tokens.append(sum(len(documents[i]) for row in mine for i in row))
        losses.append(loss)
    print(json.dumps({"cpu_s": cpu_s, "tokens": tokens, "losses": losses, "added_mib": memory.added_mib()}))


if __name__ == "__main__":
    main()
