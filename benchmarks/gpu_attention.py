"""Attention of packed documents on one GPU, forward and backward: FlexAttention, as ptf calls it, beside the packages
that `train.fused` can use and torch's own variable-length attention. Writes results/gpu_attention.{jsonl,md}.

    python benchmarks/gpu_attention.py [--into DIRECTORY] [--rounds 3] [--cases 4]

The first calls compile for 10 to 30 s a case. All get the same queries, keys and values in bf16. Milliseconds are
medians over the rounds, in which the ways take turns; gradients are compared with those of the first way. A way that
is not installed has no row.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from ptf.model.kernels.attention import Flex  # noqa: E402
from ptf.model.kernels.fused import Flash, Flash4, installed, varlen_of  # noqa: E402
from ptf.varlen import Varlen  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CALLS = 10  # of a way in a round
BOUND = 2e-2  # of the largest value: outputs and gradients of two ways, in bf16


class Case(NamedTuple):
    """Sequences of documents, and heads."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    length: int
    document: int | None  # tokens of each document; None: log-normal lengths
    window: int | None = None


CASES = [
    Case("Qwen3-0.6B", 16, 8, 128, 4, 8192, None),
    Case("Qwen3-4B, -8B", 32, 8, 128, 2, 8192, None),
    Case("Qwen3-4B, -8B", 32, 8, 128, 1, 32_768, 32_768),
    Case("Gemma-3-4B, local", 8, 4, 256, 2, 8192, None, 1024),
]


class TorchVarlen(Flash):
    """torch.nn.attention.varlen: the kernels of FlashAttention 2 that come with torch."""

    @staticmethod
    def function() -> Callable[..., Any]:
        """Return torch's function, called as flash_attn's."""
        from torch.nn.attention.varlen import varlen_attn

        def attend(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
            lengths = [named[f"{name}_{of}"] for name in ("cu_seqlens", "max_seqlen") for of in "qk"]
            window = (named["window_size"][0], 0)
            return varlen_attn(q, k, v, *lengths, scale=named["softmax_scale"], window_size=window, enable_gqa=True)  # type: ignore[return-value]

        return attend


def ways() -> dict[str, Callable[[Tensor, Tensor, Varlen], Any]]:
    found: dict[str, Callable[[Tensor, Tensor, Varlen], Any]] = {
        "FlexAttention": lambda segments, positions, varlen: Flex(segments, positions),
        "torch's varlen_attn": TorchVarlen,
    }
    if has := installed("flash_attn"):
        found[f"flash-attn {has}"] = Flash
    if has := installed("flash_attn_4"):
        found[f"flash-attn-4 {has}"] = Flash4
    return found


def lengths(case: Case) -> Iterator[list[int]]:
    """Yield the lengths of the documents of each sequence, which fill it."""
    rng = np.random.default_rng(0)
    for _ in range(case.sequences):
        left, row = case.length, list[int]()
        while left:
            drawn = case.document or int(np.clip(rng.lognormal(np.log(180), 1.03), 8, case.length // 4))
            row.append(min(left, drawn))
            left -= row[-1]
        yield row


def batch_of(case: Case) -> tuple[Tensor, Tensor, int]:
    """Return segments and positions [B, T], and the number of pairs of tokens that see each other."""
    rows = list(lengths(case))
    segments = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows], device="cuda")
    positions = torch.tensor([[i for n in row for i in range(n)] for row in rows], device="cuda")
    return segments, positions, sum(min(i + 1, case.window or i + 1) for row in rows for n in row for i in range(n))


def timed(compute: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        compute()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    segments, positions, pairs = batch_of(case)
    varlen = varlen_of(segments, positions)
    layer = SimpleNamespace(window=case.window, scale=case.head_dim**-0.5, sinks=None, softcap=None)
    g = torch.Generator("cuda").manual_seed(0)

    def drawn(heads: int) -> Tensor:
        shape = (*segments.shape, heads, case.head_dim)
        return torch.randn(shape, device="cuda", generator=g).bfloat16()

    inputs, upstream = [drawn(heads) for heads in (case.heads, case.kv_heads, case.kv_heads)], drawn(case.heads)
    rows, calls = list[dict[str, Any]](), list[tuple[Callable[[], object], Callable[[], object]]]()
    expected: list[Tensor] = []
    for name, way in ways().items():
        attend = way(segments, positions, varlen)

        def both(attend: Any = attend) -> list[Tensor]:
            q, k, v = (t.detach().requires_grad_() for t in inputs)
            out = attend(layer, q, k, v)
            out.backward(upstream)
            return [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]

        def forward(attend: Any = attend) -> Tensor:
            with torch.no_grad():
                return attend(layer, *inputs)

        began = time.monotonic()
        found = both()
        forward()
        torch.cuda.synchronize()
        first_s = time.monotonic() - began
        expected = expected or found
        pairs_of = zip(found, expected, strict=True)
        off = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs_of)
        if not off <= BOUND:
            raise SystemExit(f"{case.name}: {name} is {off:.1e} from the first way, the bound is {BOUND:.0e}")
        same = all(map(torch.equal, both(), found))
        rows.append({"way": name, "first_s": round(first_s, 1), "off": off, "repeats": same})
        calls.append((forward, both))
    spent: list[list[tuple[float, float]]] = [[] for _ in rows]
    for _ in range(rounds):
        for times, (forward, both) in zip(spent, calls, strict=True):
            times.append((timed(forward), timed(both)))
    flops = 4 * pairs * case.heads * case.head_dim  # of a forward pass
    for row, times in zip(rows, spent, strict=True):
        forward_ms, both_ms = (median(column) for column in zip(*times, strict=True))
        totals = [both for _, both in times]
        row |= {"forward_ms": round(forward_ms, 3), "both_ms": round(both_ms, 3)}
        row |= {"spread_ms": [round(min(totals), 3), round(max(totals), 3)]}
        row |= {"tflops": round(3.5 * flops / both_ms / 1e9)}  # the backward pass has 2.5 times the products
    return [{"case": case._asdict(), **row} for row in rows]


def page(found: list[dict[str, Any]], about: dict[str, str]) -> str:
    lines = [
        "# Attention of packed documents on one GPU",
        "",
        f"Command: `python benchmarks/gpu_attention.py --cases {len({json.dumps(row['case']) for row in found})}`",
        "",
        f"{about['device']}, torch {about['torch']}, {about['date']}. bf16, causal inside each document; the same "
        "inputs for all. *Log-normal*: median 180,",
        "σ 1.03. *TFLOP/s*: of the products of pairs that see each other, 7 a pair, head and dimension, forward and "
        "backward together. *Repeats*: whether two",
        "calls have the same bits; the packages are asked for that, torch's varlen_attn is not. *First*: the first "
        "call, with compilation. Largest",
        f"difference from FlexAttention, of the largest value: {max(row['off'] for row in found):.1e} (bound "
        f"{BOUND:.0e}).",
        "",
        "| heads of | heads, key heads × size | sequences | documents | window | way | forward, ms | both, ms | spread "
        "| TFLOP/s | repeats | first, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        case = Case(**row["case"])
        documents = "log-normal" if case.document is None else f"{case.document:,}"
        lines.append(
            f"| {case.name} | {case.heads}, {case.kv_heads} × {case.head_dim} | {case.sequences} × {case.length:,} "
            f"| {documents} | {case.window or '–'} | {row['way']} | {row['forward_ms']:.2f} | {row['both_ms']:.2f} "
            f"| {row['spread_ms'][0]:.2f} to {row['spread_ms'][1]:.2f} | {row['tflops']} "
            f"| {'yes' if row['repeats'] else 'no'} | {row['first_s']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=RESULTS, help="default: benchmarks/results")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first ones")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_attention.py needs a GPU; torch sees none")
    date = str(datetime.date.today())
    about = {"device": torch.cuda.get_device_name(), "torch": version("torch"), "date": date}
    given.into.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for case in CASES[: given.cases]:
        for row in measure(case, given.rounds):
            found.append(row)
            print(json.dumps(row), flush=True)
        (given.into / "gpu_attention.jsonl").write_text("".join(json.dumps(about | row) + "\n" for row in found))
        (given.into / "gpu_attention.md").write_text(page(found, about))


if __name__ == "__main__":
    main()
