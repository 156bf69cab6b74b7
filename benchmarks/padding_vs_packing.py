"""What padding costs: two ranks train a small model on a skewed set of real chats, with padded batches of 16 in a loop
over transformers, and with ptf's packing on the fly, in turn: real tokens a second,
and the loss at equal numbers of tokens.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/padding_vs_packing.py [--rounds 3] [--tokens 250000]

The set: GSM8K, OpenAssistant, task dialogues and agent trajectories of PTF_DATA, as the tokenizer's own template writes
them, up to 2,048 tokens (padded batches of longer ones do not fit 24 GiB).
Prints a JSON line a round and writes results/padding_vs_packing.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flow_runs import ROOT, cpu

RESULTS = ROOT / "benchmarks" / "results" / "padding_vs_packing.md"
PEER = ROOT / ".venv-peers" / "bin" / "python"
RANKS, BATCH, WIDTH, LONGEST, LR = 2, 16, 4096, 2048, 1e-3
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "vocab_size": 6400,
}


def documents(path: Path, shared: Path) -> np.ndarray:
    """Real chats as ids and weights; lengths."""
    from ptf.data.chat import chat_samples
    from ptf.data.tokenizer import Tokenizer
    from ptf.errors import UserError
    from tests.data.conversations import real

    tokenizer, samples = Tokenizer.load(str(shared / "tokenizers" / "minimind")), []
    for conversation in real(shared):
        if conversation.source not in ("gsm8k", "oasst", "sgd", "tau"):
            continue
        try:
            samples += chat_samples(conversation.messages, tokenizer, "", "assistant", conversation.tools)
        except UserError:  # what this template cannot show
            continue
    kept = [s for s in samples if len(s) <= LONGEST]
    lengths = np.array([len(s) for s in kept])
    np.savez(
        path,
        lengths=lengths,
        tokens=np.concatenate([s.tokens for s in kept]),
        weights=np.concatenate([s.loss_weights for s in kept]),
    )
    return lengths


def ours(given: dict[str, Any]) -> None:
    """A rank of ptf: Trainer.step over the sequences that its loader packs on the fly."""
    import resource

    from ptf.compute.world import joined
    from ptf.config.sections.model import ModelConfig
    from ptf.config.sections.train import TrainConfig
    from ptf.data.loader import Loader
    from ptf.data.partitions import Partitions
    from ptf.data.sample import PackUnit, Sample
    from ptf.data.sources.rows import SourceSpec
    from ptf.recipes.sft.recipe import SFT
    from ptf.train.trainer import Trainer, load_model

    stored = np.load(given["documents"])
    ends = np.cumsum(stored["lengths"])

    def encode(row: dict[str, Any], source: str) -> list[PackUnit]:
        i = row["n"]
        span = slice(int(ends[i] - stored["lengths"][i]), int(ends[i]))
        return [(Sample(tokens[span], weights[span], source),)]

    tokens, weights = stored["tokens"].astype(np.int32), stored["weights"].astype(np.float32)
    with joined("cpu", 600, threads=1) as world:
        train = TrainConfig(
            steps=given["steps"],
            lr=given["lr"],
            schedule="constant",
            precision="fp32",
            global_batch_sequences=given["rows"],
        )
        spec = ModelConfig(path=given["model"], init="random")
        model, _ = load_model(Path(given["model"]), world, spec, seed=given["seed"], precision="fp32")
        trainer = Trainer(model, world, train)
        partitions = Partitions(
            {"mix": SourceSpec(given["index"])},
            None,
            encode,
            partitions=8,
            seed=given["seed"],
            shuffle=1024,
            seq_len=WIDTH,
            lookahead=64,
        )  # type: ignore[arg-type]
        loader = Loader(
            partitions,
            partitions=8,
            sequences=given["rows"],
            rank=world.data_rank,
            world_size=world.data_parallel_size,
            micro_batch_sequences=given["rows"] // RANKS,
            seq_len=WIDTH,
        )
        found: dict[str, list[float]] = {
            name: [] for name in ("cpu_s", "wall_s", "tokens", "slots", "losses", "waited_s")
        }
        for step in range(given["steps"]):
            began = time.process_time(), time.perf_counter()
            batches = next(loader)
            metrics = trainer.step(batches, SFT(), step)
            spent, real, slots = world.sum(
                [
                    time.process_time() - began[0],
                    sum(sum(b.lengths) for b in batches),
                    sum(b.tokens.numel() for b in batches),
                ]
            ).tolist()
            for name, value in zip(
                found,
                (spent, time.perf_counter() - began[1], real, slots, metrics["loss"], loader.waited_s),
                strict=True,
            ):
                found[name].append(value)
        loader.close()
        if world.leads:
            print(json.dumps({**found, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def round_of(system: str, given: dict[str, Any]) -> dict[str, Any]:
    python, script = (
        (str(PEER), ["benchmarks/peers/hf_padding.py"])
        if system == "padding"
        else (sys.executable, ["benchmarks/padding_vs_packing.py", "--one"])
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "" if system == "padding" else str(ROOT),
    }
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *script]
    done = subprocess.run(
        [*command, json.dumps(given)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=250_000, help="real tokens that each trains in a round")
    parser.add_argument("--rows", type=int, default=4, help="packed sequences a step")
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/padding_vs_packing.py needs the peer's environment: make peers")
    shared = Path(os.environ.get("PTF_DATA") or ROOT.parent / "shared" / "data")
    with tempfile.TemporaryDirectory() as scratch:
        lengths = documents(Path(scratch) / "documents.npz", shared)
        (Path(scratch) / "index.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(len(lengths))))
        (Path(scratch) / "model").mkdir()
        (Path(scratch) / "model" / "config.json").write_text(json.dumps(CONFIG))
        given = {
            "documents": f"{scratch}/documents.npz",
            "index": f"{scratch}/index.jsonl",
            "model": f"{scratch}/model",
            "config": CONFIG,
            "lr": LR,
        }
        steps = {"padding": asked.tokens / (RANKS * BATCH * lengths.mean()), "ptf": asked.tokens / (asked.rows * WIDTH)}
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in steps}
        for seed in range(asked.rounds):
            for system, n in steps.items():
                found[system].append(
                    round_of(
                        system, {**given, "batch": BATCH, "rows": asked.rows, "steps": max(4, round(n)), "seed": seed}
                    )
                )
                print(json.dumps({"system": system, "round": seed, **found[system][-1]}), flush=True)
    write(found, lengths, asked)


def write(found: dict[str, list[dict[str, Any]]], lengths: np.ndarray, asked: argparse.Namespace) -> None:
    warm = 2
    rate = {s: [sum(r["tokens"][warm:]) / sum(r["cpu_s"][warm:]) for r in rounds] for s, rounds in found.items()}
    wall = {s: [sum(r["tokens"][warm:]) / sum(r["wall_s"][warm:]) for r in rounds] for s, rounds in found.items()}
    both = min(len(r["losses"]) for rounds in found.values() for r in rounds)
    last = {s: median(r["losses"][both - 1] for r in rounds) for s, rounds in found.items()}
    size = {s: median(sum(r["tokens"]) / len(r["tokens"]) for r in rounds) for s, rounds in found.items()}
    fill = {s: median(sum(r["tokens"]) / sum(r["slots"]) for r in rounds) for s, rounds in found.items()}
    ratios = [a / b for a, b in zip(rate["ptf"], rate["padding"], strict=True)]
    walls = [a / b for a, b in zip(wall["ptf"], wall["padding"], strict=True)]
    waited = median(sum(r["waited_s"][warm:]) / sum(r["wall_s"][warm:]) for r in found["ptf"])
    lines = [
        f"| {name} | {fill[s]:.3f} | {median(rate[s]):,.0f} ({min(rate[s]):,.0f} – {max(rate[s]):,.0f}) "
        f"| {median(wall[s]):,.0f} | "
        f"{size[s]:,.0f} | {last[s]:.3f} |"
        for s, name in (("padding", "padded batches of 16, transformers"), ("ptf", "ptf, packed on the fly"))
    ]
    p50, p99, most = np.percentile(lengths, [50, 99, 100])
    RESULTS.write_text(
        "# Padding against packing on the fly\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/padding_vs_packing.py', *sys.argv[1:]])}`  \nHardware: {cpu()}, "
        f"{RANKS} ranks of one thread, gloo  \n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"{len(lengths):,} samples of real chats (p50 {p50:.0f}, p99 {p99:.0f}, longest {most:.0f} tokens), "
        "a Qwen3 shape of width 256 with 4 layers from\n"
        f"scratch, fp32, AdamW at {LR:g}, about {asked.tokens:,} tokens a round, {asked.rounds} rounds in turn; "
        f"the first {warm} steps are untimed. Both\n"
        "train the assistant's turns alone.\n\n"
        "| system | share of slots that are tokens | real tokens per CPU-second (range) | per second | tokens a step "
        f"| loss of step {both} |\n|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + f"\n\nptf over padding: **{median(ratios):.2f}×** per CPU-second ({min(ratios):.2f} – {max(ratios):.2f}), "
        f"{median(walls):.2f}× per second. "
        f"ptf waited for data {waited:.2%} of the time.\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
