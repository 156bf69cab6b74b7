"""Of a metric whose name ends with `_max` the largest value counts: over passes, ranks, held-out batches and
minibatches."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.batch import Batch
from ptf.model.decoder import Decoder
from ptf.recipes.protocol import Metrics
from ptf.recipes.sft.recipe import SFT
from ptf.rl.roles import Learner, LearnerSettings
from ptf.train.batch_sharding import deal, shard_sequences_singly
from ptf.train.deterministic import DeterministicTrainer
from ptf.train.trainer import Trainer, load_model
from ptf.train.validate import held_out_metrics
from tests.model.ranks import two_ranks, world_of
from tests.recipes.of_keys import of_keys
from tests.tiny import checkpoint, sample

MODEL = "PTF_TEST_MODEL"  # the environment says to the ranks where the model is
LENGTHS = (20, 9, 14, 30)
SEQUENCES = [[(sample(length, length),)] for length in LENGTHS]
TRAINED = [int((unit[0].loss_weights != 0).sum()) for (unit,) in SEQUENCES]


class Extremes(SFT):
    """SFT that reports the most tokens of a batch, and the fewest as the largest of a negative number."""

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(model, batch, frozen_models)
        tokens = (batch.loss_weights != 0).sum().double()
        return loss, {**metrics, "tokens_max": tokens, "negative_tokens_max": -tokens}


EXPECTED = {"tokens_max": max(TRAINED), "negative_tokens_max": -min(TRAINED)}


def found(world: World) -> dict[str, dict[str, float]]:
    """By what computes them: the largest values of batches of one sequence."""
    spec, model_directory = ModelConfig(path="-"), Path(os.environ[MODEL])
    results = {}
    for deterministic in (False, True):
        model = load_model(model_directory, World() if deterministic else world, spec, seed=0, precision="fp32")
        train = TrainConfig(steps=1, lr=1e-3, deterministic=deterministic)
        if deterministic:
            micro, numbers = shard_sequences_singly(SEQUENCES, world)
        else:
            micro, numbers = deal(SEQUENCES, world, 1, 64), []
        trainer = (DeterministicTrainer if deterministic else Trainer)(model, world, train)
        metrics = trainer.step(micro, of_keys(Extremes), 0, numbers)
        results["deterministic" if deterministic else "trainer"] = {name: metrics[name] for name in EXPECTED}
        if not deterministic:
            metrics = held_out_metrics(model, of_keys(Extremes), {"some": SEQUENCES}, world, 1, 64, {})
            results["held out"] = {name: metrics[f"{name}/some"] for name in EXPECTED}
    return results


def on_rank() -> dict[str, dict[str, float]]:
    return found(world_of(MeshSizes(shard=2)))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_largest_value_of_passes_and_ranks_counts(tmp_path, monkeypatch, ranks):
    monkeypatch.setenv(MODEL, str(checkpoint(tmp_path / "model")))
    results = [found(World())] if ranks == 1 else two_ranks(on_rank, tmp_path)
    assert results == [dict.fromkeys(("trainer", "held out", "deterministic"), EXPECTED)] * ranks


def test_the_largest_value_of_minibatches_counts_and_losses_are_averaged(tmp_path):
    directory = checkpoint(tmp_path / "model")
    settings = LearnerSettings(
        directory=directory,
        section=ModelConfig(path=str(directory)),
        train=TrainConfig(steps=10, lr=1e-12, precision="fp32", micro_batch_sequences=1),
        seed=0,
        seq_len=64,
        recipe=of_keys(Extremes),
        tokenizer="",
    )
    learner = Learner(World(), settings)
    alone = [learner.update([sequence], 0)["loss"] for sequence in SEQUENCES]
    together = learner.update(SEQUENCES, 0)
    assert {name: together[name] for name in EXPECTED} == EXPECTED
    mean = sum(loss * count for loss, count in zip(alone, TRAINED, strict=True)) / sum(TRAINED)
    assert together["loss"] == pytest.approx(mean, rel=1e-6)
