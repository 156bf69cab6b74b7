"""Loading a sharded model needs memory for the shards and one slice, never for the model."""

import ctypes
import gc
import json
import threading
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ptf.config.sections.compute import MeshSizes
from ptf.model import bridge
from ptf.model.sharding import parallelize
from tests.model.ranks import two_ranks, world_of
from tests.tiny import SIZES

CONFIG = {
    "model_type": "qwen3",
    **SIZES,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "vocab_size": 16_384,
    "tie_word_embeddings": False,
}
MIB = 2**20
SLACK = 48 * MIB  # a slice of the largest tensor (16 MiB), its fp32 copy, and what Python and torch take by the way


def resident() -> int:
    """Bytes of this process that no file backs: pages of a mapped checkpoint are the kernel's,
    and leave when they are needed."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def load(directory: Path, tensor: int, whole: bool) -> tuple[int, int]:
    """(Most memory while a model was loaded, bytes of this rank's shards). `whole`:
    every tensor is read before any is cut."""
    world = world_of(MeshSizes(shard=2 // tensor, tensor=tensor))
    model = bridge.build(directory)
    parallelize(model, world.meshes, "fp32")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier model left to the allocator would hide what this one takes
    before, most, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    if whole:
        model.to_empty(device=world.device)
        model.load_hf_tensors({n: t.clone() for n, t in load_file(directory / "model.safetensors").items()})
    else:
        model.give_weights(directory, world.device)
    done.set()
    thread.join()
    return most - before, sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]


def every_way(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        name: load(directory, tensor, whole)
        for name, tensor, whole in (("fsdp", 1, False), ("tensor", 2, False), ("whole", 1, True))
    }


def test_a_rank_needs_memory_for_its_shards_alone(tmp_path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    model = bridge.build(directory)
    model.give_weights(Path(), torch.device("cpu"), random=True, seed=0)
    save_file(
        {n: t.contiguous() for n, t in model.hf_tensors()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    total = sum(p.nbytes for p in model.parameters())
    assert total > 150 * MIB
    for found in two_ranks(partial(every_way, directory), tmp_path):
        for name in ("fsdp", "tensor"):
            most, shards = found[name]
            assert shards < 0.51 * total
            assert most < shards + SLACK, f"{name}: {most / MIB:.0f} MiB for {shards / MIB:.0f}"
            assert most < 0.85 * total
        assert found["whole"][0] > total + 0.4 * total  # negative control: the measure sees a whole model
