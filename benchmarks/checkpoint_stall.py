"""How long training waits for a checkpoint: a step's stall beside the time that a copy of its state takes, and that its
writing takes. Writes results/checkpoint_stall.md.

    python benchmarks/checkpoint_stall.py [--saves 10]

A Qwen3 shape with its AdamW state is saved to a temporary directory again and again; the next save begins when the one
before it is written. Prints a JSON line a save.
"""

import json
import tempfile
import time
from pathlib import Path

import torch
from commands import options
from flow_runs import results_page
from pages import head, spread, table, write_page
from published_shapes import qwen3
from torch.utils._pytree import tree_map_only

from ptf.compute.checkpoint import Checkpoints, tensors_of
from ptf.compute.saver import BackgroundWriter, Saver
from ptf.compute.world import joined
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.model import bridge
from ptf.train.optim import groups

SHAPE = qwen3(512, 8, 8, 1536, tied=True) | {"num_key_value_heads": 4, "head_dim": 64}
SHAPE |= {"vocab_size": 32_000, "torch_dtype": "float32"}
COLUMNS = {
    "copy_s": "a copy of the state on the host",
    "stall_s": "training waits",
    "written_s": "until it is written, SHA-256 and fsync included",
}


def main() -> None:
    asked = options(__doc__, saves=10)
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch, joined("cpu", 600) as world:
        source = Path(scratch) / "model"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(SHAPE))
        model = bridge.build(source)
        model.give_weights(Path(), world.device, random=True, seed=0)
        optimizer = torch.optim.AdamW(groups(model, 0.0, {}), lr=1e-3, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        saves = Checkpoints(f"{scratch}/checkpoints", CheckpointConfig(every=1, keep=1), steps=asked.saves)
        saver = Saver(saves, BackgroundWriter(world, 600))
        for step in range(1, asked.saves + 1):
            began = time.perf_counter()
            held = tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), tensors_of(model, optimizer))
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
    about = head("What a checkpoint makes training wait", ", local disk") + (
        f"{size / 2**20:,.0f} MiB a checkpoint (fp32 weights and AdamW's two averages), {len(rounds)} saves; seconds, "
        "median (range).\n\n"
    )
    cells = [spread([r[key] for r in rounds], ".3f") for key in COLUMNS]
    words = (
        f"Training waits {spread(ratios, '.2f')} times the copy; {over} of {len(rounds)} waits were longer than\n"
        "0.1 s and than twice the copy. A save that begins before the one before it is written waits for that too."
    )
    write_page(results_page("checkpoint_stall.md"), about, [table(list(COLUMNS.values()), [cells]), "", words])


if __name__ == "__main__":
    main()
