"""Dealing sequences to ranks: nothing is lost, every rank makes as many passes, and what fills up trains nothing."""

import numpy as np
import pytest
import torch

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.data.batch import Batch
from ptf.meshes import Meshes
from ptf.model.head import Head
from ptf.recipes.grpo.recipe import GRPO
from ptf.train.batch_sharding import deal
from tests.recipes.of_keys import of_keys
from tests.rl.test_grpo import groups


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [0, 1, 5, 17])
def test_every_rank_gets_equally_many_batches_and_nothing_is_lost(workers, sequences):
    packed = [[unit] for unit in of_keys(GRPO).compute_advantages(groups(6, 4))][:sequences]
    shares = [deal(packed, World(rank, Meshes(MeshSizes(shard=workers))), 4, 40) for rank in range(workers)]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) >= 1
    batches = [batch for share in shares for batch in share]
    assert sum(float(of_keys(GRPO).denominator(b)) for b in batches) == sum(s.loss_weights.sum() for ((s,),) in packed)
    for batch in batches if sequences else []:
        assert {"advantages", "old_logprobs", "reference_logprobs"} <= batch.token_columns.keys()


def test_a_batch_of_filling_alone_has_a_loss_of_zero_and_gradients():
    packed = [[unit] for unit in of_keys(GRPO).compute_advantages(groups(1, 4))][:1]
    (batch,) = deal(packed, World(1, Meshes(MeshSizes(shard=2))), 4, 40)
    assert isinstance(batch, Batch)
    weight = torch.zeros((), requires_grad=True)

    def model(tokens, positions, segments, head_fn, varlen):
        x = torch.ones(*tokens.shape, 4) * weight
        return head_fn(x, Head(torch.ones(97, 4), 97))

    loss, _ = of_keys(GRPO, kl_coef=0.1).loss(model, batch, {})
    loss.backward()
    assert float(loss) == 0
    assert float(weight.grad) == 0
    assert np.isfinite(float(loss))
