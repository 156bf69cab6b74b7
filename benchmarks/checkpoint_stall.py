"""How long training waits for a checkpoint: a step's stall beside the time that a copy of its state takes, and that its
writing takes. Writes results/checkpoint_stall.md.

    python benchmarks/checkpoint_stall.py [--saves 10]

A Qwen3 shape with its AdamW state is saved to a temporary directory again and again; the next save begins when the one
before it is written. Prints a JSON line a save.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.compute.checkpoint import Checkpoints, copied, tensors_of  # noqa: E402
from ptf.compute.saver import Saver  # noqa: E402
from ptf.compute.world import joined  # noqa: E402
from ptf.config.sections.train import TrainConfig  # noqa: E402
from ptf.model import bridge  # noqa: E402
from ptf.train.optim import adamw, groups  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "checkpoint_stall.md"
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 32_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=10)
    asked = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch, joined("cpu", 600) as world:
        source = Path(scratch) / "model"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(SHAPE))
        model, _ = bridge.build(source)
        bridge.materialize(model, world.device)
        bridge.random_init(model, 0)
        optimizer = adamw(groups(model, 0.0, {}), TrainConfig(lr=1e-3))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        saves = Checkpoints(f"{scratch}/checkpoints", every=1, keep=1, steps=asked.saves)
        saver = Saver(saves, world, 600)
        for step in range(1, asked.saves + 1):
            began = time.perf_counter()
            held = copied(tensors_of(model, optimizer))
            copy_s = time.perf_counter() - began
            del held
            stall_s = saver.save(step, model, optimizer, {}, {})
            began = time.perf_counter()
            saver.wait()
            rounds.append({"copy_s": copy_s, "stall_s": stall_s, "written_s": stall_s + time.perf_counter() - began})
            print(json.dumps({"save": step, **rounds[-1]}), flush=True)
        size = sum(f.stat().st_size for f in Path(saves.path(asked.saves)).rglob("*") if f.is_file())
    ratios = [r["stall_s"] / r["copy_s"] for r in rounds]
    over = sum(r["stall_s"] > max(0.1, 2 * r["copy_s"]) for r in rounds)

    def cell(key):
        return (
            f"{median(r[key] for r in rounds):.3f} ({min(r[key] for r in rounds):.3f} – "
            f"{max(r[key] for r in rounds):.3f})"
        )

    RESULTS.write_text(
        "# What a checkpoint makes training wait\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/checkpoint_stall.py', *sys.argv[1:]])}`  \nHardware: {cpu()}, "
        "local disk  \n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"{size / 2**20:,.0f} MiB a checkpoint (fp32 weights and AdamW's two averages), {len(rounds)} saves; seconds, "
        "median (range).\n\n"
        "| a copy of the state on the host | training waits | until it is written, SHA-256 and fsync included |\n"
        "|---|---|---|\n"
        f"| {cell('copy_s')} | {cell('stall_s')} | {cell('written_s')} |\n\n"
        f"Training waits {median(ratios):.2f} times the copy ({min(ratios):.2f} – {max(ratios):.2f}); "
        f"{over} of {len(rounds)} waits were longer than\n"
        "0.1 s and than twice the copy. A save that begins before the one before it is written waits for that too.\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
