"""GRPO's loss and credit against the equations, written out densely in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from ptf.data.batch import Batch
from ptf.data.packing import pack_all
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.model import bridge
from ptf.model.sampling import LogitsProcessing
from ptf.recipes.grpo.recipe import GRPO, group_relative
from tests.recipes.of_keys import of_keys
from tests.tiny import checkpoint


def trajectory(seed: int, outcome, **token_columns) -> Trajectory:
    rng = np.random.default_rng(seed)
    context, sampled = (rng.integers(0, 97, n).astype(np.int32) for n in (5 + seed % 3, 2 + seed % 5))
    n = len(sampled)
    generation = Generation(context, sampled, np.full(n, -1, np.float32), np.zeros(n, np.int32), True)
    drawn = {name: (-rng.random(n) * 3).astype(np.float32) for name in ("old_logprobs", "reference_logprobs")}
    return Trajectory(Prompt(context, {}, "a", seed), (generation,), "", outcome, {**drawn, **token_columns})


def groups(n: int = 3, size: int = 4) -> list[tuple[Trajectory, ...]]:
    return [tuple(trajectory(10 * g + i, Reward(float((g + i) % 3))) for i in range(size)) for g in range(n)]


@pytest.mark.parametrize(
    "recipe",
    [
        of_keys(GRPO),
        of_keys(GRPO, kl_coef=0.1),
        of_keys(GRPO, clip_low=0.1, clip_high=0.3, kl_coef=0.02, scale_by_std=False, processing=LogitsProcessing(0.8)),
    ],
)
def test_loss_and_gradient_equal_the_equations(tmp_path, recipe):
    model = bridge.load(checkpoint(tmp_path / "m"))
    model.double()
    scored = groups()
    sequences = pack_all(recipe.compute_advantages(scored), 40)
    batch = Batch.of(sequences, 40)
    assert len(sequences) > 1
    loss, _ = recipe.loss(model, batch, {})
    ours = torch.autograd.grad(loss / recipe.denominator(batch), list(model.parameters()))

    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in scored:
        r = np.array([t.outcome.value for t in group])
        advantages = (r - r.mean()) / (r.std(ddof=1) + 1e-6) if recipe.config.scale_by_std else r - r.mean()
        for t, a in zip(group, advantages, strict=True):
            (generation,) = t.generations
            ids = torch.tensor(np.concatenate([generation.context, generation.sampled_ids]).astype(np.int64))[None]
            positions = torch.arange(ids.shape[1])[None]
            logits = model(ids, positions, torch.zeros_like(positions), lambda x, head: head.logits(x))[0]
            logp = (
                (logits / recipe.context.processing.temperature)
                .log_softmax(-1)[len(generation.context) - 1 : -1]
                .gather(1, ids[0, len(generation.context) :, None])
                .squeeze(1)
            )
            old, ref = (torch.tensor(t.token_columns[s]).double() for s in ("old_logprobs", "reference_logprobs"))
            rho = (logp - old).exp()
            surrogate = torch.minimum(rho * a, rho.clamp(1 - recipe.config.clip_low, 1 + recipe.config.clip_high) * a)
            k3 = (ref - logp).exp() - (ref - logp) - 1
            total = total + (-surrogate + recipe.config.kl_coef * k3).sum()
            tokens += len(generation.sampled_ids)
    assert float(recipe.denominator(batch)) == tokens
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    for a, b in zip(ours, torch.autograd.grad(total / tokens, list(model.parameters())), strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()) + 1e-9
    flipped = recipe.with_keys(clip_low=recipe.config.clip_high + 0.05)
    assert float(flipped.loss(model, batch, {})[0].detach()) != float(loss.detach())


@pytest.mark.parametrize(
    "recipe",
    [
        of_keys(GRPO),
        of_keys(GRPO, processing=LogitsProcessing(0.8), loss_aggregation="constant_length", max_new_tokens=7),
        of_keys(GRPO, importance_sampling_level="sequence", loss_aggregation="episode_mean"),
    ],
)
def test_the_first_step_from_rollouts_has_the_gradient_of_any_other(tmp_path, recipe):
    """Where π_old is the policy, what is known beforehand gives the same as what is found on the way."""
    model = bridge.load(checkpoint(tmp_path / "m"))
    sampled = [tuple(dataclasses.replace(t, token_columns={}) for t in g) for g in groups()]
    batch = Batch.of(pack_all(recipe.compute_advantages(sampled), 40), 40)
    assert recipe.can_fuse_policy_gradient(batch)
    found = []
    for way in (recipe.loss, NotForeseen(recipe.config, recipe.context).loss):
        loss, metrics = way(model, batch, {})
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.item(), gradients, {k: float(v) for k, v in metrics.items()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5, abs=1e-6)
    assert found[0][2] == pytest.approx({k: found[1][2][k] for k in found[0][2]}, rel=1e-5, abs=1e-6)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))
        for a, b in zip(found[0][1], found[1][1], strict=True)
    )


class NotForeseen(GRPO):
    """The same, which finds its gradient on the way."""

    def can_fuse_policy_gradient(self, batch):
        return False


class Halved(GRPO):
    """A user's surrogate, which ptf has to call."""

    def policy_losses(self, ratio, clipped, advantages, logprobs):
        return super().policy_losses(ratio, clipped, advantages, logprobs) / 2


def test_a_surrogate_of_a_subclass_is_called_in_the_only_step_too(tmp_path):
    model = bridge.load(checkpoint(tmp_path / "m"))
    sampled = [tuple(dataclasses.replace(t, token_columns={}) for t in g) for g in groups()]
    recipe = of_keys(GRPO)
    batch = Batch.of(pack_all(recipe.compute_advantages(sampled), 40), 40)
    whole = float(recipe.loss(model, batch, {})[0].detach())
    halved = float(Halved(recipe.config, recipe.context).loss(model, batch, {})[0].detach())
    assert halved == pytest.approx(whole / 2, rel=1e-5)
    assert abs(whole) > 1e-3, "the control: they differ"


def test_answers_without_a_result_enter_no_advantage():
    ok = [trajectory(i, Reward(float(i % 2))) for i in range(4)]
    failed = trajectory(9, NoResult("the reward crashed"))
    units = of_keys(GRPO).compute_advantages([(*ok[:2], failed, *ok[2:])])
    assert len(units) == 4
    expected = group_relative(np.array([0.0, 1.0, 0.0, 1.0]), True)
    assert [float(a[0].token_columns["advantages"][-1]) for a in units] == pytest.approx(expected.tolist())
    as_zero = group_relative(np.array([0.0, 1.0, 0.0, 0.0, 1.0]), True)  # what it would be if a crash were a 0
    assert not np.allclose(expected, as_zero[[0, 1, 3, 4]])
    assert of_keys(GRPO).compute_advantages([(ok[0], failed)]) == []


@pytest.mark.parametrize("rest", [{}, {"kl_coef": 0.1, "update_epochs": 2, "clip_low": 0.01, "tis_cap": 0.9}])
def test_metrics_of_a_loss_by_a_constant_length_are_means_over_answers(tmp_path, rest):
    """Its coefficients do not add up to the number of answers that a step divides by."""
    model = bridge.load(checkpoint(tmp_path / "m"))
    found = []
    for loss_aggregation in ("constant_length", "episode_mean"):
        recipe = of_keys(GRPO, loss_aggregation=loss_aggregation, max_new_tokens=1000, **rest)
        made = groups() if rest else [tuple(dataclasses.replace(t, token_columns={}) for t in g) for g in groups()]
        batch = Batch.of(pack_all(recipe.compute_advantages(made), 40), 40)
        _, metrics = recipe.loss(model, batch, {})
        assert metrics.keys() >= {"entropy", "clip_share", "approx_kl"}
        assert not rest or metrics.keys() >= {"kl_reference", "tis_beyond_share"}
        assert float(metrics["entropy"]) > 0.1
        found.append({name: float(value) for name, value in metrics.items() if name != "loss"})
    assert found[0] == found[1]
    assert not rest or 0 < found[0]["clip_share"] <= float(recipe.denominator(batch))


@pytest.mark.parametrize(
    "recipe",
    [
        of_keys(GRPO),
        of_keys(GRPO, loss_aggregation="constant_length", max_new_tokens=7, kl_coef=0.1),
        of_keys(GRPO, importance_sampling_level="sequence", loss_aggregation="episode_mean"),
    ],
)
def test_a_prompt_counts_as_the_weight_of_its_row_says(tmp_path, recipe):
    """As if its group were there so often."""
    model = bridge.load(checkpoint(tmp_path / "m"))
    first, second, third = groups()
    weighed = tuple(dataclasses.replace(t, prompt=dataclasses.replace(t.prompt, weight=3.0)) for t in second)
    found = []
    for these in ([first, weighed, third], [first, second, second, second, third], [first, second, third]):
        batch = Batch.of(pack_all(recipe.compute_advantages(these), 40), 40)
        found.append((float(recipe.loss(model, batch, {})[0]), float(recipe.denominator(batch))))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


@pytest.mark.parametrize("weight", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("recipe", [of_keys(GRPO), of_keys(GRPO, kl_coef=0.1, loss_aggregation="episode_mean")])
def test_the_weight_of_a_row_scales_its_gradient_and_its_part_of_the_denominator(tmp_path, recipe, weight):
    """∇(L₁ + w L₂) / (n₁ + w n₂), where n counts the tokens, or the answers, of a prompt's group."""
    model = bridge.load(checkpoint(tmp_path / "m"))
    model.double()
    one, two = groups(2)
    weighed = tuple(dataclasses.replace(t, prompt=dataclasses.replace(t.prompt, weight=weight)) for t in two)

    def gradient(these):
        batch = Batch.of(pack_all(recipe.compute_advantages(these), 40), 40)
        loss, _ = recipe.loss(model, batch, {})
        return torch.autograd.grad(loss, list(model.parameters())), float(recipe.denominator(batch))

    of_one, n_one = gradient([one])
    of_two, n_two = gradient([two])
    of_both, n_both = gradient([one, weighed])
    assert n_both == pytest.approx(n_one + weight * n_two)
    counted = [len(t.generations[0].sampled_ids) if recipe.config.loss_aggregation == "token_mean" else 1 for t in two]
    assert n_two == sum(counted)
    for both, a, b in zip(of_both, of_one, of_two, strict=True):
        assert torch.allclose(both, a + weight * b, rtol=1e-5, atol=1e-7 * float(both.abs().max()))
    unweighed = max(float((both - a - b).abs().max()) for both, a, b in zip(of_both, of_one, of_two, strict=True))
    assert (unweighed > 1e-4) == (weight != 1)


def test_context_is_never_trained():
    for (sample,), t in zip(of_keys(GRPO).compute_advantages(groups()), [t for g in groups() for t in g], strict=True):
        c = len(t.prompt.tokens)
        assert not sample.loss_weights[:c].any()
        assert sample.loss_weights[c:].all()
        assert not sample.token_columns["advantages"][:c].any()
        assert sample.token_columns["old_logprobs"][c:].tolist() == t.token_columns["old_logprobs"].tolist()
