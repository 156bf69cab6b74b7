"""Packed SFT on one GPU, random weights: tokens per second, MFU and peak memory at the shapes of real models.
One JSON line a shape.

    python benchmarks/gpu_sft.py [--shapes 0.6b 1.7b 4b] [--seq-len 8192] [--steps 20]

Documents have log-normal lengths (median 180, p99 about 2,000); bf16 compute over fp32 master weights, AdamW,
no activation checkpointing.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from ptf.compute.meter import peak_flops  # noqa: E402
from ptf.compute.world import joined  # noqa: E402
from ptf.data.batch import Batch  # noqa: E402
from ptf.data.packing import pack_all  # noqa: E402
from ptf.data.sample import Sample  # noqa: E402
from ptf.model.bridge import materialize, random_init  # noqa: E402
from ptf.model.chunked import cross_entropy  # noqa: E402
from ptf.model.config import DecoderConfig, Layer, Rope  # noqa: E402
from ptf.model.decoder import Decoder  # noqa: E402
from ptf.model.flops import Flops  # noqa: E402
from ptf.model.sharding import parallelize  # noqa: E402
from ptf.train.optim import adamw, groups  # noqa: E402

# (dim, layers, heads, kv_heads, intermediate_size, tied): the published Qwen3 shapes, to be timed and not loaded
SHAPES = {
    "0.6b": (1024, 28, 16, 8, 3072, True),
    "1.7b": (2048, 28, 16, 8, 6144, True),
    "4b": (2560, 36, 32, 8, 9728, True),
    "8b": (4096, 36, 32, 8, 12288, False),
}


def batches(rows: int, width: int, vocab: int, count: int) -> list[Batch]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(180), 1.03, 40 * rows * count * width // 2048), 8, min(2048, width)).astype(
        int
    )
    samples = [
        (Sample(rng.integers(0, vocab, n).astype(np.int32), (np.arange(n) >= 0.4 * n).astype(np.float32)),)
        for n in lengths
    ]
    packed = pack_all(samples, width)[: rows * count]
    return [Batch.of(packed[i * rows : (i + 1) * rows], width) for i in range(count)]


def measure(name: str, width: int, rows: int, steps: int) -> dict:
    dim, layers, heads, kv, intermediate_size, tied = SHAPES[name]
    config = DecoderConfig(
        vocab=151_936,
        dim=dim,
        heads=heads,
        kv_heads=kv,
        head_dim=128,
        intermediate_size=intermediate_size,
        norm_eps=1e-6,
        max_positions=width,
        tied=tied,
        layers=(Layer(Rope(1e6)),) * layers,
        qk_norm=True,
    )
    with joined("cuda", 600) as world:
        with torch.device("meta"):
            model = Decoder(config)
        parallelize(model, world.mesh, "bf16")
        materialize(model, world.device)
        random_init(model, 0)
        optimizer = adamw(groups(model, 0.0, {}), lr=1e-5, betas=(0.9, 0.95), eps=1e-8)
        flops, seconds, work, tokens = Flops.of(model), [], [], []
        for i, cpu_batch in enumerate(batches(rows, width, config.vocab, steps)):
            batch = cpu_batch.to(world.device)
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = model(
                batch.tokens,
                batch.positions,
                batch.segments,
                partial(cross_entropy, targets=batch.targets, weights=batch.weights),
            )
            (loss / batch.weights.sum()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            if i >= 3:  # warm-up
                seconds.append(time.perf_counter() - began)
                work.append(flops.step(batch.lengths, int((batch.weights != 0).sum())))
                tokens.append(sum(batch.lengths))
        rate = [w / s for w, s in zip(work, seconds, strict=True)]
        return {
            "shape": name,
            "device": torch.cuda.get_device_name(),
            "seq_len": width,
            "rows": rows,
            "steps": len(seconds),
            "tok_s": round(median(t / s for t, s in zip(tokens, seconds, strict=True))),
            "mfu": round(median(rate) / peak_flops(world.device, "bf16"), 4),
            "step_s": round(median(seconds), 4),
            "spread_s": [round(min(seconds), 4), round(max(seconds), 4)],
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "1.7b", "4b"], choices=list(SHAPES))
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_sft.py needs a GPU; torch sees none")
    for name in given.shapes:
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps(measure(name, given.seq_len, given.rows, given.steps)), flush=True)


if __name__ == "__main__":
    main()
