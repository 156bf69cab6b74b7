"""An episode that was split into several samples counts as one that was not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.packing import pack_all
from ptf.data.trajectory import Generation, Prompt, Reward, Trajectory
from ptf.recipes.documents import episode_shares
from ptf.recipes.grpo.recipe import GRPO
from tests.recipes.of_keys import of_keys
from tests.rl.test_family import Given

LENGTHS = {"a": (2, 3, 1), "b": (4,), "c": (1, 2)}  # sampled tokens of the turns of each episode


def episode(name: str, number: int, extends: bool, weight: float = 1.0) -> Trajectory:
    """Return an episode whose sampled tokens have unique marks; each context extends the one before, or begins anew."""
    generations, before = list[Generation](), np.array([1], np.int32)
    for turn, n in enumerate(LENGTHS[name]):
        context = np.append(before, 2) if extends or turn == 0 else np.array([50 + turn, 3], np.int32)
        ids = np.full(n, 10 * number + turn, np.int32)
        generations.append(Generation(context.astype(np.int32), ids, np.float32(0 * ids), 0 * ids, True))
        before = np.concatenate([context, ids])
    marks = np.arange(1, sum(LENGTHS[name]) + 1, dtype=np.float32) + 10 * number
    prompt = Prompt(np.array([1], np.int32), {}, "a", 0, weight)
    return Trajectory(
        prompt, tuple(generations), "", Reward(float(number)), {"marks": marks, "old_logprobs": -marks / 30}
    )


def group(extends: bool) -> tuple[Trajectory, ...]:
    return tuple(episode(name, i, extends, weight=2.0) for i, name in enumerate(LENGTHS))


def outcome(
    recipe: GRPO, minibatches: list[list[PackUnit]]
) -> tuple[float, float, dict[float, float], dict[str, float]]:
    """Return loss, denominator, the gradients of the tokens' log-probs and the metrics, over all minibatches."""
    loss, denominator, gradients, metrics = 0.0, 0.0, dict[float, float](), dict[str, float]()
    for units in minibatches:
        batch = Batch.of(pack_all(units, 40), 40)
        marks = batch.token_columns["marks"]
        logprobs = (-marks / 31 + 0.1 * torch.sin(marks)).requires_grad_()
        of_batch, metrics_of_batch = recipe.loss(Given(logprobs), batch, {})  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(of_batch, logprobs)
        loss, denominator = loss + float(of_batch.detach()), denominator + float(recipe.denominator(batch))
        sampled = batch.loss_weights != 0
        gradients |= dict(zip(marks[sampled].tolist(), gradient[sampled].tolist(), strict=True))
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in metrics_of_batch.items()}
    return loss, denominator, gradients, metrics


def without_column(units: list[PackUnit]) -> list[PackUnit]:
    """Return the units as if each sample were an episode."""
    drop = "episode_tokens"
    return [
        tuple(replace(s, token_columns={k: v for k, v in s.token_columns.items() if k != drop}) for s in unit)
        for unit in units
    ]


@pytest.mark.parametrize("loss_aggregation", ["token_mean", "episode_mean", "constant_length"])
def test_the_same_tokens_have_the_same_loss_in_one_sample_and_in_several(loss_aggregation):
    recipe = of_keys(GRPO, loss_aggregation=loss_aggregation, max_new_tokens=9, clip_high=9.0, clip_low=9.0)
    whole, parts = (recipe.compute_advantages([group(extends)]) for extends in (True, False))
    assert (len(whole), len(parts)) == (3, 6)
    assert not any("episode_tokens" in sample.token_columns for (sample,) in whole)
    wanted = outcome(recipe, [whole])
    assert wanted[1] == 2.0 * (13 if loss_aggregation == "token_mean" else 3)
    for minibatches in ([parts], [parts[1:4], [*parts[:1], *parts[4:]]]):  # also where an episode is in both
        found = outcome(recipe, minibatches)
        assert found[:2] == pytest.approx(wanted[:2], rel=1e-5)
        assert found[2] == pytest.approx(wanted[2], rel=1e-4, abs=1e-7)
        assert found[3] == pytest.approx(wanted[3], rel=1e-4, abs=1e-6)
    as_samples = outcome(recipe, [without_column(parts)])  # negative control
    if loss_aggregation == "token_mean":
        assert as_samples[:2] == pytest.approx(wanted[:2], rel=1e-5)
    else:
        assert as_samples[1] == 2.0 * 6
        assert as_samples[0] / as_samples[1] != pytest.approx(wanted[0] / wanted[1], rel=1e-2)


def test_the_shares_of_an_episodes_samples_add_up_to_one():
    batch = Batch.of(pack_all(of_keys(GRPO).compute_advantages([group(False)]), 40), 40)
    shares = episode_shares(batch)
    assert sorted(shares.tolist()) == pytest.approx(sorted([2 / 6, 3 / 6, 1 / 6, 1.0, 1 / 3, 2 / 3]))
    batch = Batch.of(pack_all(of_keys(GRPO).compute_advantages([group(True)]), 40), 40)
    assert episode_shares(batch).tolist() == [1.0] * 3
