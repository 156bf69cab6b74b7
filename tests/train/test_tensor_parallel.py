"""A whole run over a tensor group: the same data, the same numbers, and a checkpoint that one worker continues."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import load, loads
from ptf.config.sections.compute import MeshSizes
from ptf.data.packing import pack_all
from ptf.errors import UserError
from ptf.meshes import Meshes
from ptf.run import run
from ptf.train.batch_sharding import deal
from ptf.train.budget import budget
from tests.tiny import arithmetic, job_file, sample
from tests.train.test_loop import weights

NUMBERS = ("loss", "grad_norm", "tokens", "loss_denominator", "loss/held_out")


def numbers(directory: Path) -> np.ndarray:
    return np.array([[row.get(name, 0.0) for name in NUMBERS] for row in read_metrics(directory / "metrics.jsonl")])


@pytest.mark.long
def test_two_workers_hold_one_model_together(tmp_path) -> None:
    raw = arithmetic(tmp_path)
    alone = run(loads(yaml.safe_dump(raw)), "alone")
    shared = {
        **raw,
        "compute": {**raw["compute"], "launcher": "torchrun", "workers": 2, "mesh": {"tensor_parallel_size": 2}},
    }
    shared["train"] = {**raw["train"], "activation_checkpointing": "selective"}
    together = run(loads(yaml.safe_dump(shared)), "together")
    assert numbers(together) == pytest.approx(numbers(alone), rel=1e-5)
    a, b = weights(alone), weights(together)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-4
    shutil.rmtree(together / "checkpoints" / "step_00000012")
    (together / "metrics.jsonl").write_text(
        "".join((together / "metrics.jsonl").read_text().splitlines(keepends=True)[:10])
    )
    shutil.rmtree(together / "model")
    resumed = weights(run(loads(yaml.safe_dump(raw)), "together"))
    assert max(float((resumed[n] - b[n]).abs().max()) for n in a) < 1e-5
    # it did begin from the other's weights
    assert not torch.equal(next(iter(a.values())), next(iter(resumed.values())))


def test_a_tensor_group_gets_the_same_rows() -> None:
    packed = pack_all([(sample(n, n),) for n in (9, 30, 4, 22, 17)], 40)
    two_groups = Meshes(MeshSizes(shard=2, tensor=2))
    shares = [[b.tokens.tolist() for b in deal(packed, World(rank, two_groups), 1, 40)] for rank in range(4)]
    assert shares[0] == shares[1] != shares[2] == shares[3]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size \(3\) must divide compute.workers \(8\)"),
        ({"replicate": 3}, r"replicate \(3\) × context_parallel_size \(1\) × tensor_parallel_size \(1\) must divide"),
        (
            {"tensor_parallel_size": 4, "replicate": 4},
            r"replicate \(4\) × context_parallel_size \(1\) × tensor_parallel_size \(4\)",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_workers_is_refused(tmp_path, mesh, message) -> None:
    raw = {**arithmetic(tmp_path), "compute": {"workers": 8, "launcher": "torchrun", "mesh": mesh}}
    with pytest.raises(UserError, match=message):
        load(job_file(raw, tmp_path))


def test_a_mesh_that_does_not_divide_the_heads_is_refused_before_anything_is_built(tmp_path) -> None:
    """Two key-value heads over four ranks, as `ptf plan` and every rank find it."""
    raw = arithmetic(tmp_path)
    raw["compute"] = {"workers": 4, "launcher": "torchrun", "mesh": {"tensor_parallel_size": 4}}
    with pytest.raises(
        UserError,
        match=r"compute\.mesh\.tensor_parallel_size: 4 does not divide the model's 2 key-value heads; set it to one",
    ):
        budget(loads(yaml.safe_dump(raw)), tmp_path / "model", 4)
