"""A step of two sharded ranks against the equations: each has a part of the batches,
and both have the whole gradient."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.document import PackUnit
from ptf.data.packing import pack_all
from ptf.model.decoder import Decoder
from ptf.train.batch_sharding import deal
from ptf.train.trainer import Trainer, load_model
from tests.model.parallel import checkpoint as family_checkpoint
from tests.model.ranks import on_processes, two_ranks, world_of
from tests.recipes import dense, test_dpo, test_kd, test_rm
from tests.recipes.on_meshes import recipes_on_rank
from tests.tiny import SIZES, checkpoint

PLACE = "PTF_TEST_MODELS"  # the environment says to the ranks where the models are
RECIPES = {
    "dpo": test_dpo.FORMS["dpo"],
    "kd": test_kd.FORMS["two"],
    "kd of top": test_kd.FORMS["top of two"],
    "rm": test_rm.FORMS["centred"],
}
CASES = [(name, lora) for name in RECIPES for lora in (None, LoraConfig(rank=4))]


def units(name: str) -> list[PackUnit]:
    return test_kd.units(9) if "kd" in name else test_dpo.units(7)


def load(name: str, world: World, lora: LoraConfig | None) -> tuple[Decoder, dict[str, Decoder]]:
    """Return the model that is trained and its frozen models."""
    root, recipe = Path(os.environ[PLACE]), RECIPES[name]

    def one(place, **more):
        return load_model(
            root / place, world, ModelConfig(path="-", lora=more.pop("lora", None)), seed=0, precision="fp32", **more
        )

    model = test_dpo.stirred(one(recipe.head, head=recipe.head, lora=lora))
    return model, {
        role: model if role == "reference" and lora else one(role).requires_grad_(False)
        for role in recipe.frozen_models
    }


def on_rank() -> list[tuple[float, dict[str, Tensor]]]:
    """Return the loss and the whole gradients of every case."""
    world, found = world_of(MeshSizes(shard=2)), []
    for name, lora in CASES:
        model, beside = load(name, world, lora)
        means, _ = Trainer(model, world, TrainConfig(steps=1, lr=1e-3), beside).forward_backward(
            deal(pack_all(units(name), 40), world, 1, 40), RECIPES[name], ()
        )
        found.append(
            (means["loss"], {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
        )  # type: ignore[union-attr]
    return found


def expected(name: str, lora: LoraConfig | None, root: Path) -> tuple[float, dict[str, Tensor]]:
    recipe: Any = RECIPES[name]
    network = dense.model(root / recipe.head, scalar=recipe.head == "scalar")
    theirs, leaves = dense.adapted(network, load(name, World(), lora)[0]) if lora else (network, {})
    if name == "dpo":
        loss = test_dpo.expected(recipe, theirs, dense.model(root / ("lm" if lora else "reference")), units(name))
    elif name == "rm":
        loss = test_rm.expected(recipe, theirs, units(name))
    else:
        loss = test_kd.expected(
            recipe, theirs, {teacher: dense.model(root / teacher) for teacher in recipe.config.teachers}, units(name)
        )
    loss.backward()
    return float(loss.detach()), {n: leaf.grad for n, leaf in leaves.items()} if lora else dense.gradients(network)


@pytest.mark.cluster
def test_two_sharded_ranks_have_the_loss_and_the_gradient_of_the_equations(tmp_path, monkeypatch):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    checkpoint(tmp_path / "lm", seed=1)
    checkpoint(tmp_path / "reference", seed=2)
    checkpoint(tmp_path / "big", seed=2, hidden_size=96, num_hidden_layers=3, tie_word_embeddings=False)
    checkpoint(tmp_path / "small", seed=3, hidden_size=32, vocab_size=120)
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1, initializer_range=0.2)).save_pretrained(
        tmp_path / "scalar"
    )
    monkeypatch.setenv(PLACE, str(tmp_path))
    (tmp_path / "ranks").mkdir()
    for case, *ranks in zip(CASES, *two_ranks(on_rank, tmp_path / "ranks"), strict=True):
        wanted, gradients = expected(*case, tmp_path)
        for loss, found in ranks:
            assert loss == pytest.approx(wanted, rel=2e-5), case
            assert found.keys() == gradients.keys()
            for n, gradient in gradients.items():
                assert float((found[n][: len(gradient)] - gradient).abs().max() / gradient.abs().max()) < 1e-4, (
                    case,
                    n,
                )


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        MeshSizes(context=2),
        *(
            pytest.param(each, marks=pytest.mark.cluster)
            for each in (MeshSizes(context=4), MeshSizes(context=2, tensor=2))
        ),
    ],
    ids=str,
)
def test_recipes_find_on_ranks_that_divide_sequences_what_they_find_on_one(tmp_path, sizes):
    directory = family_checkpoint(tmp_path / "model", "qwen3")
    found, *_ = on_processes(sizes.ranks, partial(recipes_on_rank, directory, sizes), tmp_path)
    for name, (means, gradients, same_denominator) in found.items():
        print(name, f"metrics {means:.1e} gradients {gradients:.1e} denominator the same: {same_denominator}")
    assert all(means <= 1e-6 and gradients <= 1e-6 and same for means, gradients, same in found.values())
