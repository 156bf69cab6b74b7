"""Training steps on the pretend GPU."""

from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from ptf.config.sections.compute import MeshSizes
from ptf.model import context_parallel
from ptf.model.recompute import Recompute
from tests.gpu_rehearsal.step import RECIPES, host_syncs, on_ranks, variants

MOST = 2  # the metrics, and the norm of the gradient


OTHERS = ("Gemma-3-4B", "gpt-oss-20b", "Qwen3-30B-A3B")
CASES = [*(("Qwen3-0.6B", recipe) for recipe in RECIPES), *((shape, "sft") for shape in OTHERS)]


@pytest.mark.long
@pytest.mark.parametrize(("shape", "recipe"), CASES)
def test_a_step_waits_for_the_gpu_twice(pretend_cuda, shape, recipe):
    syncs = pretend_cuda(host_syncs, shape, recipe)
    assert sum(syncs.values()) <= MOST, syncs


@pytest.mark.long
@pytest.mark.parametrize("recomputed", get_args(Recompute))
def test_ranks_that_divide_sequences_wait_and_sum_as_one_does(pretend_cuda, recomputed):
    alone = pretend_cuda(on_ranks, MeshSizes(), recomputed)
    assert sum(alone[0].values()) == MOST
    for sizes in (MeshSizes(context=2), MeshSizes(context=2, tensor=2)):
        assert pretend_cuda(on_ranks, sizes, recomputed) == alone


def waiting() -> dict[str, int]:
    """The negative control: every exchange before attention reads a value."""
    exchanged = context_parallel.to_heads

    def reading(parts: Sequence[Tensor], group: torch.distributed.ProcessGroup) -> list[Tensor]:
        assert float(parts[0].sum()) == 1
        return exchanged(parts, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "to_heads", reading)
        return on_ranks(MeshSizes(context=2), "block")[0]


def test_a_wait_in_an_exchange_is_seen(pretend_cuda):
    layers, passes, forwards = 2, 2, 2
    assert sum(pretend_cuda(waiting).values()) == MOST + layers * passes * forwards


@pytest.mark.parametrize(("shape", "recipe"), [("Qwen3-0.6B", "sft"), ("Qwen3-0.6B", "dpo"), ("gpt-oss-20b", "sft")])
def test_a_step_and_a_validation_call_attention_as_the_warm_up_does(pretend_cuda, shape, recipe):
    """So nothing is compiled after it: shapes, strides, dtypes and what has a gradient are the same."""
    warmed, used = pretend_cuda(variants, shape, recipe)
    assert used
    assert set(used) <= set(warmed)
