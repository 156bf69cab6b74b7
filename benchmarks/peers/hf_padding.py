"""A padded training loop over transformers, as one writes it by hand: `torchrun --nproc-per-node N hf_padding.py JSON`;
rank 0 prints one JSON line."""

import json
import resource
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

given = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world, batch = dist.get_rank(), dist.get_world_size(), given["batch"]
stored = np.load(given["documents"])
ends = np.cumsum(stored["lengths"])
starts = ends - stored["lengths"]
order = np.random.default_rng(given["seed"]).permutation(len(ends))
torch.manual_seed(given["seed"])
shape = AutoConfig.for_model(**given["config"])
model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa")
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], betas=(0.9, 0.95), weight_decay=0.0, fused=True)
cpu, wall, tokens, losses, slots = [], [], [], [], []
for step in range(given["steps"]):
    mine = [order[(step * world * batch + rank * batch + i) % len(order)] for i in range(batch)]
    width = max(int(stored["lengths"][i]) for i in mine)
    ids, mask = torch.zeros(batch, width, dtype=torch.int64), torch.zeros(batch, width, dtype=torch.int64)
    labels = torch.full((batch, width), -100)
    for row, i in enumerate(mine):
        document, trained = (
            torch.from_numpy(stored["tokens"][starts[i] : ends[i]].astype(np.int64)),
            stored["weights"][starts[i] : ends[i]] > 0,
        )
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
        labels[row, : len(document)] = torch.where(torch.from_numpy(trained), document, -100)
    began = time.process_time(), time.perf_counter()
    counts = torch.tensor([float((labels[:, 1:] != -100).sum()), float(mask.sum()), float(mask.numel())])
    dist.all_reduce(counts)
    loss = ddp(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=counts[0]).loss * world
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    spent = torch.tensor([time.process_time() - began[0], float(loss.detach()) / world])
    dist.all_reduce(spent)
    cpu.append(float(spent[0]))
    wall.append(time.perf_counter() - began[1])
    losses.append(float(spent[1]))
    tokens.append(int(counts[1]))
    slots.append(int(counts[2]))
if rank == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps({"cpu_s": cpu, "wall_s": wall, "tokens": tokens, "slots": slots, "losses": losses, "peak_mib": peak})
    )
dist.destroy_process_group()
