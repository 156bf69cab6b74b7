"""Training steps on the pretend GPU."""

import pytest

from tests.gpu_rehearsal.step import RECIPES, host_syncs, variants

MOST = 2  # the metrics, and the norm of the gradient


OTHERS = ("Gemma-3-4B", "gpt-oss-20b", "Qwen3-30B-A3B")
CASES = [*(("Qwen3-0.6B", recipe) for recipe in RECIPES), *((shape, "sft") for shape in OTHERS)]


@pytest.mark.long
@pytest.mark.parametrize(("shape", "recipe"), CASES)
def test_a_step_waits_for_the_gpu_twice(pretend_cuda, shape, recipe):
    syncs = pretend_cuda(host_syncs, shape, recipe)
    assert sum(syncs.values()) <= MOST, syncs


@pytest.mark.parametrize(("shape", "recipe"), [("Qwen3-0.6B", "sft"), ("Qwen3-0.6B", "dpo"), ("gpt-oss-20b", "sft")])
def test_a_step_and_a_validation_call_attention_as_the_warm_up_does(pretend_cuda, shape, recipe):
    """So nothing is compiled after it: shapes, strides, dtypes and what has a gradient are the same."""
    warmed, used = pretend_cuda(variants, shape, recipe)
    assert used
    assert set(used) <= set(warmed)
