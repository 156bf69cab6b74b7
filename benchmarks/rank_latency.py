"""`/v1/rank` over catalogues of 10,000 and 1,000,000 items beside one matrix product of that size, by turns.

A model with 2 layers and random weights has one token for each item. Requests go over the loopback interface to a
server in this process, so that CPU-seconds are those of the client and the server together, on one thread. The product
is of the hidden states, [histories, D], and the items' rows, [D, items]. Writes results/rank_latency.md.

    python benchmarks/rank_latency.py [--items 10000 1000000] [--dim 64] [--requests 200]

Exits 1 if requests over 1,000,000 items take more than 3 times the CPU-seconds of the product, in the median.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from commands import options
from flow_runs import results_page
from pages import head, table, write_page
from serving import asked, quantiles

AIM, LARGE = 3.0, 1_000_000
BASKETS, BASKET, BATCH = 5, 8, 64
CLOCKS = (time.process_time, time.perf_counter)


def service(directory: Path, items: int, dim: int) -> Any:
    """Return the service of a model with random weights and a catalogue of so many items."""
    from ptf.data.event_tokenizer import event_tokenizer
    from ptf.events.catalogue import Catalogue, Item
    from ptf.events.serialize import GAPS, HistorySerializer
    from ptf.rl.engines.native import NativeEngine
    from ptf.serving.ranking import RankService
    from tests.tiny import checkpoint

    texts = [f"<i_{n}>" for n in range(items)]
    tokenizer = event_tokenizer([*(f"<gap_{n}>" for n in range(GAPS)), *texts], directory)
    checkpoint(directory, vocab_size=tokenizer.vocab_size, hidden_size=dim, eos_token_id=tokenizer.stop_ids[0])
    rng = np.random.default_rng(0)
    facts = zip(texts, rng.lognormal(1, 1, items).tolist(), rng.random(items).tolist(), strict=True)
    catalogue = Catalogue(
        tuple(Item(f"item{n}", text, value, share) for n, (text, value, share) in enumerate(facts)),
        tokenizer.identity["fingerprint"],
    )
    engine = NativeEngine(str(directory), device=torch.device("cpu"), dtype=torch.float32, version=0)
    serializer = HistorySerializer(catalogue.by_name, 512, True, 1.0)
    return RankService(engine, tokenizer, "m", catalogue, serializer, beam=100, max_length=256)


def histories(rng: np.random.Generator, items: int, number: int) -> list[Any]:
    """Return histories of five baskets of eight items."""
    return [
        [
            {"time": 86400 * 9 * basket, "items": [f"item{n}" for n in rng.integers(0, items, BASKET)]}
            for basket in range(BASKETS)
        ]
        for _ in range(number)
    ]


def spent(call: Callable[[], Any]) -> list[float]:
    """Return the CPU-seconds and the seconds of a call."""
    began = [clock() for clock in CLOCKS]
    call()
    return [clock() - start for clock, start in zip(CLOCKS, began, strict=True)]


async def measured(
    ranks: Any, items: int, number: int, kinds: dict[str, tuple[int, dict[str, Any]]]
) -> list[list[Any]]:
    """Return a row of the page for each kind of request: (histories, options) by name."""
    from ptf.serving.public_endpoint import PublicEndpoint

    endpoint = PublicEndpoint([ranks], "m", host="127.0.0.1", port=0, key=None)
    await endpoint.start()
    rng, rows = np.random.default_rng(1), list[list[Any]]()
    weight = dict(ranks.ranker.engine.model.hf_tensors())["model.embed_tokens.weight"][-items:]
    for name, (batch, wanted) in kinds.items():
        requests, products = list[list[float]](), list[list[float]]()
        for turn in range(2 + max(10, number // batch)):
            body = {"histories": histories(rng, items, batch), "k": 10, **wanted}
            began = [clock() for clock in CLOCKS]
            await asked(endpoint.server.port, "POST", "/v1/rank", body)
            request = [clock() - start for clock, start in zip(CLOCKS, began, strict=True)]
            hidden = torch.randn(batch, weight.shape[1])
            product = spent(lambda hidden=hidden: hidden @ weight.t())
            if turn > 1:  # the first ones warm up
                requests.append(request)
                products.append(product)
        (cpu, wall), (product, _) = zip(*requests, strict=True), zip(*products, strict=True)
        ratio = statistics.median(cpu) / statistics.median(product)
        times = [statistics.median(product), statistics.median(cpu), *quantiles(list(wall))[:2]]
        rows.append([f"{items:,}", name, len(cpu), *(f"{1000 * one:,.1f}" for one in times), f"{ratio:.2f}"])
        print(json.dumps(rows[-1]), flush=True)
    await endpoint.close()
    return rows


def main() -> int:
    args = options(__doc__, items=[], dim=64, requests=200)
    torch.set_num_threads(1)
    busy = os.getloadavg()[0]
    rows = list[list[Any]]()
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "1 history": (1, {}),
        "1 history, `share_new: 0.3`, `value_weight: 0.25`": (1, {"share_new": 0.3, "value_weight": 0.25}),
        f"{BATCH} histories": (BATCH, {}),
    }
    for items in args.items or [10_000, LARGE]:
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            began = time.process_time()
            ranks = service(Path(directory), items, args.dim)
            print(f"{items:,} items: ready after {time.process_time() - began:.0f} CPU-seconds", flush=True)
            rows += asyncio.run(measured(ranks, items, args.requests, kinds))
    lines = table(
        "items | request | number | product, CPU ms | request, CPU ms | p50, ms | p99, ms | CPU of request / product",
        rows,
    )
    about = head("Latency of `/v1/rank`", f", one thread; load average before: {busy:.1f}") + (
        f"Histories have {BASKETS} baskets of {BASKET} items; the model has 2 layers, width {args.dim} and one token "
        "for each item; lists have 10 places.\nThe server and its client are one process, which has one thread for "
        "products. A request and one matrix product,\n[histories, "
        f"{args.dim}] × [{args.dim}, items], take turns. CPU ms are medians; p50 and p99 are of the time that a client "
        f"waits.\nAim: at {LARGE:,} items a request takes at most {AIM:.0f} times the CPU time of the product.\n"
        "At 10,000 items most of it is the model's layers, which read the 46 tokens of a history.\n\n"
    )
    missed = [f"{row[1]} at {row[0]} items" for row in rows if row[0] == f"{LARGE:,}" and float(row[-1]) > AIM]
    return write_page(results_page("rank_latency.md"), about, [lines], missed)


if __name__ == "__main__":
    sys.exit(main())
