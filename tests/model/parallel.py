"""Training a small member of a family on any mesh: what several ranks must find alike."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.model.chunked import cross_entropy
from ptf.model.families import family_of
from ptf.model.recompute import Recompute
from ptf.model.sharding import PLAN, parallelize
from ptf.model.tensor_parallel import ParallelStyle
from ptf.train import trainer
from tests.model.ranks import on_processes, world_of
from tests.tiny import packed

ROWS = ([30, 11, 6], [47], [5, 41], [17, 1, 29])  # four micro-batches, by the lengths of their documents
WIDTH = 47  # odd: a tensor group of 2 must fill it up
SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 64,
    "vocab_size": 131,
    "num_hidden_layers": 2,
    "attention_bias": True,
}
LORA = LoraConfig(rank=4, alpha=8.0)


@dataclass(frozen=True)
class Case:
    """One run."""

    directory: str
    mesh: MeshSizes | None = None
    lora: bool = False
    steps: int = 20
    recomputed: Recompute = "none"
    precision: str = "fp32"
    plan: Mapping[str, ParallelStyle] = field(default_factory=dict)  # in place of entries of PLAN
    packed: bool = False  # the base of the adapters is held in four bits


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    gradients: list[dict[str, Tensor]]  # of every fourth step and the last, whole; {} for the others


def checkpoint(directory: Path, family: str, **more: Any) -> str:
    """A model that 2 ranks divide, in which nothing is 0 or 1, so that no test passes by its being there."""
    config = family_of({"model_type": family}).random_config(random.Random(f"parallel/{family}")) | SHAPE
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    config |= {k: 4 for k in counts if k in config} | {"num_experts_per_tok": 2}
    if "n_routed_experts" in config:
        config |= {"n_group": 2, "topk_group": 1}
    if "kv_lora_rank" in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
        config["q_lora_rank"] = 16
        del config["head_dim"]
    if "layer_types" in config:
        config["layer_types"] = [*dict.fromkeys(config["layer_types"])][:2] * 2
        config["layer_types"] = config["layer_types"][: SHAPE["num_hidden_layers"]]
    config |= more
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    model = trainer.load_model(
        directory, World(), ModelConfig(path=str(directory), init="random"), seed=0, precision="fp32"
    )
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():  # the bits of a bias of the choice of experts
                p.copy_((0.2 * torch.randn(p.shape, generator=g)).view(p.dtype))
                continue
            real = p[: SHAPE["vocab_size"]] if name.startswith(("embed", "head")) else p
            real += 0.1 * torch.randn(real.shape, generator=g)
    save_file(
        {n: t.contiguous() for n, t in model.hf_tensors()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(directory)


def train(case: Case) -> Trained:
    """Train the case on this rank; every rank returns the same losses and gradients."""
    world = World() if case.mesh is None else world_of(case.mesh)
    quantization: Any = "nf4" if case.packed else None
    spec = ModelConfig(path=case.directory, lora=LORA if case.lora else None, quantization=quantization)
    trainer.parallelize = partial(parallelize, plan={**PLAN, **case.plan})  # type: ignore[assignment]
    model = trainer.load_model(
        Path(case.directory), world, spec, seed=0, precision=case.precision, recomputed=case.recomputed
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_b"):
                p += 0.02  # as if it had been trained: at 0 the gradient of A is
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5, betas=(0.9, 0.95))
    losses, gradients = [], []
    for step in range(case.steps):
        batches = [packed([list(row)], WIDTH, seed=100 * step + i) for i, row in enumerate(ROWS)]
        units, total = sum(float(b.loss_weights.sum()) for b in batches), 0.0
        for b in batches[world.data_rank :: world.meshes.sizes.data]:
            loss = model(
                b.tokens, b.positions, b.segments, partial(cross_entropy, targets=b.targets, weights=b.loss_weights)
            )
            if (balance := model.load_balancing_loss()) is not None:
                loss = loss + 0.01 * balance * float(b.loss_weights.sum())
            (loss / units).backward()
            total += float(loss.detach()) / units
        losses.append(float(world.sum(total)))
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if step % 4 and step + 1 < case.steps:
            found = {}  # gathering them takes most of the time
        gradients.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in found.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients)


def train_each(cases: Sequence[Case]) -> list[Trained]:
    """Train each case, one after the other, on this rank."""
    return [train(case) for case in cases]


def on_ranks(size: int, cases: Sequence[Case], directory: Path) -> list[Trained]:
    """Train each case on `size` processes, which are started once."""
    directory.mkdir(parents=True)
    return on_processes(size, partial(train_each, cases), directory)[0]


def largest(values: Iterable[float]) -> float:
    """The largest value, or NaN if any is; Python's `max` may lose it."""
    return float(np.max(list(values)))


def difference(a: Trained, b: Trained) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and the largest difference of the gradients of a step (its
    norm over the norm of the gradients). It is infinite if the gradients are of different tensors."""
    loss = largest(abs(x - y) / abs(x) for x, y in zip(a.losses, b.losses, strict=True))

    def norm(g):
        return float(torch.cat([t.double().flatten() for t in g]).norm())

    if any(x.keys() != y.keys() for x, y in zip(a.gradients, b.gradients, strict=True)):
        return loss, float("inf")
    return loss, largest(
        norm([x[n] - y[n] for n in x]) / norm(x.values()) for x, y in zip(a.gradients, b.gradients, strict=True) if x
    )
