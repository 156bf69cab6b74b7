"""GRPO's family: losses and advantages beside verl's own, on random numbers, wherever both define them;
what verl does not have beside the papers."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import assume, given
from hypothesis.strategies import floats, sampled_from
from torch import Tensor

from ptf.config import Job, loads
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.packing import pack_all
from ptf.data.trajectory import Generation, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.model.chunked import TokenLogprobs
from ptf.model.sampling import LogitsProcessing
from ptf.recipes.grpo.recipe import GRPO, group_relative, leave_one_out
from ptf.recipes.policy import estimate_kl
from ptf.recipes.registry import build
from tests.recipes.of_keys import of_keys
from tests.rl.test_grpo import groups, trajectory

LONGEST = 12
FORMS = {
    "tokens": of_keys(GRPO, clip_high=0.3),
    "samples": of_keys(GRPO, loss_aggregation="episode_mean"),
    "length": of_keys(GRPO, loss_aggregation="constant_length", scale_by_std=False, max_new_tokens=LONGEST),
    "gspo": of_keys(
        GRPO, importance_sampling_level="sequence", loss_aggregation="episode_mean", clip_low=0.02, clip_high=0.03
    ),
    "gspo of tokens": of_keys(GRPO, importance_sampling_level="sequence", clip_low=0.02, clip_high=0.03),
    "trusted": of_keys(GRPO, tis_cap=1.1),
    "trusted sequences": of_keys(GRPO, tis_cap=1.3, tis_level="sequence"),
    "masked": of_keys(GRPO, tis_cap=1.1, tis_mode="mask"),
    "dual clip": of_keys(GRPO, dual_clip=1.1),
    "cispo": of_keys(GRPO, policy_loss="cispo", clip_low=0.1, clip_high=0.1, tis_cap=1.1),
    "rloo": of_keys(GRPO, baseline="leave_one_out", scale_by_std=False),
}
AGGREGATION = {
    "token_mean": "token-mean",
    "episode_mean": "seq-mean-token-mean",
    "constant_length": "seq-mean-token-sum-norm",
}


class Given:
    """A model that returns given log-probs of each position."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs = logprobs

    def __call__(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, head_fn: object, varlen: object
    ) -> TokenLogprobs:
        zero = torch.zeros_like(self.logprobs)
        return TokenLogprobs(self.logprobs, zero, zero)


def padded(values: Tensor, batch: Batch) -> Tensor:
    """[B, T] → [answers, longest]: the trained positions of each answer, as verl lays them out."""
    rows = [values[(batch.segments == d) & (batch.loss_weights != 0)] for d in range(len(batch.lengths))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_verls(form):
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    recipe = FORMS[form]
    made = [tuple(with_rollout(t, seed=7 * g + i) for i, t in enumerate(group)) for g, group in enumerate(groups(4, 5))]
    batch = Batch.of(pack_all(recipe.compute_advantages(made), 40), 40)
    g = torch.Generator().manual_seed(1)
    columns, noise = batch.token_columns, 0.2 * torch.randn(batch.loss_weights.shape, generator=g)
    logprobs = (columns["old_logprobs"] + noise).requires_grad_()
    loss, _ = recipe.loss(Given(logprobs), batch, {})  # type: ignore[arg-type]
    (ours,) = torch.autograd.grad(loss / recipe.denominator(batch), logprobs)

    config: Any = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=0.2,
        clip_ratio_low=recipe.config.clip_low,
        clip_ratio_high=recipe.config.clip_high,
        clip_ratio_c=recipe.config.dual_clip or 1e9,
    )
    given = (columns["old_logprobs"], logprobs, columns["advantages"], torch.ones_like(logprobs))
    old, new, advantages, mask = (padded(v, batch) for v in given)
    weights = padded_weights(recipe, old - padded(columns["rollout_logprobs"], batch), batch)
    config.global_batch_info.update(
        {"loss_scale_factor": LONGEST} if recipe.config.loss_aggregation == "constant_length" else {}
    )
    name = {"clip": "vanilla", "cispo": "cispo"}[recipe.config.policy_loss]
    theirs = core_algos.get_policy_loss_fn("gspo" if recipe.config.importance_sampling_level == "sequence" else name)
    wanted, _ = theirs(old, new, advantages, mask, AGGREGATION[recipe.config.loss_aggregation], config, weights)
    (gradient,) = torch.autograd.grad(wanted, logprobs)
    if recipe.config.policy_loss == "clip":  # the value of CISPO's loss means nothing
        assert float(loss.detach() / recipe.denominator(batch)) == pytest.approx(float(wanted.detach()), abs=1e-6)
    assert float((ours - gradient).abs().max()) <= 1e-6
    assert gradient.abs().max() > 1e-3


def padded_weights(recipe: GRPO, logs: Tensor, batch: Batch) -> Tensor | None:
    """The weights π_old / π_engine, [answers, longest], of their logarithms, which are 0 where there is no token."""
    if recipe.tis_cap is None:
        return None
    weights = (logs.sum(1, keepdim=True).expand_as(logs) if recipe.config.tis_level == "sequence" else logs).exp()
    if recipe.config.tis_mode == "truncate":
        return weights.clamp(max=recipe.tis_cap)
    return weights * ((weights <= recipe.tis_cap) & (weights >= 1 / recipe.tis_cap))


@given(
    ratio=floats(-1.5, 1.5),
    off=floats(-1.5, 1.5),
    advantage=floats(-2.0, 2.0),
    cap=sampled_from([1.1, 2.0, None]),
    mode=sampled_from(["truncate", "mask"]),
    loss=sampled_from(["clip", "cispo"]),
    dual=sampled_from([None, 1.2, 3.0]),
)
def test_the_gradient_of_a_token_is_that_of_the_formula(ratio, off, advantage, cap, mode, loss, dual):
    """In float64, for one token whose log-ratio to the old policy, and whose old one's to the engine's, are given."""
    recipe = of_keys(GRPO, tis_cap=cap, tis_mode=mode, policy_loss=loss, dual_clip=dual, clip_low=0.2, clip_high=0.3)
    logprob = torch.tensor([[-1.0 + ratio]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Batch.of([[(Document(np.zeros(2, np.int32), np.array([0.0, 1.0], np.float32)),)]], 2)
    r = logprob - -1.0
    clipped = r.exp().clamp(0.8, 1.3)
    value = recipe.policy_losses(r.exp(), clipped, advantage * one, logprob)
    if cap:
        value = value * recipe.importance_weights(off * one, cap, batch)[0]
    (found,) = torch.autograd.grad(value.sum(), logprob)

    edges = [(math.exp(ratio), (0.8, 1.3, dual or 1.3)), (math.exp(off), (cap or 1.0, 1 / (cap or 1.0)))]
    assume(all(abs(value - edge) > 1e-9 for value, of in edges for edge in of))  # where the gradient has no value
    rho, weight = math.exp(ratio), math.exp(off) if cap else 1.0
    if cap and mode == "truncate":
        weight = min(weight, cap)
    elif cap and not 1 / cap <= weight <= cap:
        weight = 0.0
    if loss == "cispo":
        wanted = -min(max(rho, 0.8), 1.3) * advantage
    else:
        flat = (advantage > 0 and rho > 1.3) or (advantage < 0 and rho < 0.8)
        bounded = dual is not None and advantage < 0 and rho > dual
        wanted = 0.0 if flat or bounded else -rho * advantage
    assert float(found) == pytest.approx(weight * wanted, abs=1e-12)


def with_rollout(t: Trajectory, seed: int) -> Trajectory:
    """Return the trajectory with log-probs of an engine that differ a little from the trainer's."""
    (generation,) = t.generations
    noise = 0.1 * np.random.default_rng(seed).normal(size=len(generation.sampled_ids))
    off = (t.token_columns["old_logprobs"] + noise).astype(np.float32)
    sampled = Generation(generation.context, generation.sampled_ids, off, generation.versions, True)
    return Trajectory(t.prompt, (sampled,), t.text, t.outcome, t.token_columns)


@pytest.mark.parametrize("scaled", [True, False])
def test_advantages_within_a_group_are_verls(scaled):
    from verl.trainer.ppo import core_algos

    rewards = np.random.default_rng(3).normal(size=(6, 5))
    mask = torch.ones(30, 4)
    given = torch.zeros(30, 4).index_put(
        (torch.arange(30), torch.tensor(3)), torch.tensor(rewards.reshape(-1), dtype=torch.float32)
    )
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        given, mask, np.repeat(np.arange(6), 5), norm_adv_by_std_in_grpo=scaled
    )
    np.testing.assert_allclose(
        np.concatenate([group_relative(r, scaled) for r in rewards]), theirs[:, 0].numpy(), rtol=1e-6, atol=1e-6
    )


def test_advantages_of_the_others_are_verls():
    from verl.trainer.ppo import core_algos

    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(6, 5))
    flat, index = torch.tensor(rewards.reshape(-1, 1)), np.repeat(np.arange(6), 5)
    wanted, _ = core_algos.compute_rloo_outcome_advantage(flat.clone(), torch.ones(30, 1), index)
    assert np.abs(np.concatenate([leave_one_out(group) for group in rewards]) - wanted[:, 0].numpy()).max() <= 1e-6


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_of_the_kl_are_verls_and_have_its_mean(kind):
    from verl.trainer.ppo import core_algos

    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50, generator=g).log_softmax(-1) for _ in range(2))
    ours = estimate_kl(kind, p, q)
    # theirs ends at 10
    assert torch.allclose(
        ours.clamp(max=10) if kind == "k3" else ours, core_algos.kl_penalty_forward(p, q, kind), atol=1e-5
    )
    near = (p + 0.02 * q).log_softmax(-1)  # where k2's bias is small
    kl = float((p.exp() * (p - near)).sum())
    assert float((p.exp() * estimate_kl(kind, p, near)).sum()) == pytest.approx(kl, rel=0.05)


def test_kl_may_be_taken_from_the_reward():
    recipe = of_keys(GRPO, kl_coef=0.5, kl_in="reward", kl_estimator="k1", scale_by_std=False)
    one, other = trajectory(0, Reward(1.0)), trajectory(1, Reward(1.0))
    costs = [
        0.5 * float((t.token_columns["old_logprobs"] - t.token_columns["reference_logprobs"]).sum())
        for t in (one, other)
    ]
    found = [float(unit[0].token_columns["advantages"][-1]) for unit in recipe.compute_advantages([(one, other)])]
    assert found == pytest.approx([(costs[1] - costs[0]) / 2, (costs[0] - costs[1]) / 2], abs=1e-6)


@pytest.mark.parametrize(("tokens", "lost"), [(1, 0.0), (80, 0.0), (90, 0.5), (100, 1.0)])
def test_long_answers_lose_reward_by_a_straight_line(tokens, lost):
    episode: Any = SimpleNamespace(num_sampled_tokens=tokens)
    assert of_keys(GRPO, max_new_tokens=100, overlong_buffer_tokens=20).overlong_penalty(episode) == pytest.approx(lost)
    assert of_keys(GRPO, max_new_tokens=100).overlong_penalty(episode) == 0


def test_the_length_penalty_is_subtracted():
    recipe = of_keys(GRPO, scale_by_std=False, max_new_tokens=3, overlong_buffer_tokens=4)
    episode = trajectory(0, Reward(0.1))
    assert recipe.overlong_penalty(episode) > 0
    assert recipe.reward(episode) == 0.1 - recipe.overlong_penalty(episode) == 0.1 + -recipe.overlong_penalty(episode)


def job_of(algo: dict[str, Any], rollout: dict[str, Any], recipe: str = "grpo") -> Job:
    values = {"model": {"path": "m"}, "data": {"sources": {"a": {"path": "a"}}}, "train": {"steps": 1, "lr": 1}}
    return loads(yaml.safe_dump({**values, "recipe": recipe, "algo": algo, "rollout": rollout}))


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, r"algo\.kl_estimator +on policy, the gradient of k1 is 0 on average"),
        ({"baseline": "leave_one_out"}, r"algo\.scale_by_std +must be false with algo\.baseline: leave_one_out"),
        (
            {"overlong_buffer_tokens": 999},
            r"algo\.overlong_buffer_tokens +\(999\) is more than rollout\.max_new_tokens",
        ),
        (
            {"tis_mode": "mask", "tis_cap": None},
            r"algo\.tis_mode +and algo\.tis_level have no effect without algo\.tis_cap",
        ),
        ({"tis_mode": "mask", "tis_cap": 1.0}, r"algo\.tis_cap +must be above 1"),
        ({"policy_loss": "cispo", "dual_clip": 3.0}, r"algo\.dual_clip +is for algo\.policy_loss: clip"),
        (
            {"policy_loss": "cispo", "importance_sampling_level": "sequence"},
            r"algo\.policy_loss +cispo weights each token",
        ),
        ({"turn_discount": 0.5}, r"algo\.turn_discount +has no effect without algo\.credit_level: turn"),
        (
            {"credit_level": "turn", "baseline": "leave_one_out", "scale_by_std": False},
            r"algo\.credit_level +turn is for episodes",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(algo, message):
    with pytest.raises(UserError, match=message):
        job_of(algo, {"reward": {"use": "a:b"}})


ENVIRONMENT = {"reward": None, "environment": {"use": "a:b"}}


@pytest.mark.parametrize(
    ("recipe", "algo", "message"),
    [
        ("grpo", {"credit_level": "turn", "baseline": "leave_one_out", "scale_by_std": False}, None),
        ("grpo", {"credit_level": "turn"}, r"algo\.baseline +must be leave_one_out with algo\.credit_level: turn"),
        ("ppo", {"credit_level": "turn", "bootstrap_truncated": True}, None),
        ("ppo", {"overlong_filter": True, "bootstrap_truncated": True}, r"algo\.bootstrap_truncated +has no effect"),
    ],
)
def test_the_credit_of_episodes_has_rules_of_its_own(recipe, algo, message):
    if message is None:
        build(job_of(algo, ENVIRONMENT, recipe))
    else:
        with pytest.raises(UserError, match=message):
            job_of(algo, ENVIRONMENT, recipe)


PLUGIN = {"use": "a:b"}


@pytest.mark.parametrize(
    "episodes",
    [{"environment": PLUGIN}, {"environment": {"a": PLUGIN}}, {"play": PLUGIN}, {"harness": {"agent": PLUGIN}}],
    ids=["environment", "by source", "play", "harness"],
)
def test_turns_have_credit_and_no_length_penalty_in_every_kind_of_episode(episodes):
    build(job_of({"credit_level": "turn", "baseline": "leave_one_out", "scale_by_std": False}, episodes))
    with pytest.raises(UserError, match=r"algo\.overlong_buffer_tokens +applies to single responses"):
        job_of({"overlong_buffer_tokens": 4}, episodes)


def test_an_overlong_filter_leaves_out_of_the_loss_what_was_truncated_and_not_of_the_baseline():
    (group,) = groups(1)
    cut = tuple(dataclasses.replace(t, complete=i != 1) for i, t in enumerate(group))
    for recipe in (of_keys(GRPO), of_keys(GRPO, baseline="leave_one_out", scale_by_std=False, credit_level="turn")):
        every = recipe.compute_advantages([cut])
        kept = recipe.with_keys(overlong_filter=True).compute_advantages([cut])
        assert len(every) == len(kept) + 1 == 4
        for (sample,), (wanted,) in zip(kept, every[:1] + every[2:], strict=True):
            assert sample.tokens.tolist() == wanted.tokens.tolist()
            assert sample.token_columns["advantages"].tolist() == wanted.token_columns["advantages"].tolist()
    none = tuple(dataclasses.replace(t, complete=False) for t in group)
    assert of_keys(GRPO, overlong_filter=True).compute_advantages([none]) == []
    assert len(of_keys(GRPO, overlong_filter=True).compute_advantages([group])) == 4


def test_the_ratio_of_a_sample_is_the_geometric_mean_of_its_tokens():
    """One answer of two tokens, by hand."""
    generation = Generation(
        np.array([1], np.int32), np.array([2, 3], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), True
    )
    prompt, columns = Prompt(generation.context, {}, "a", 0), {"old_logprobs": np.array([-1.0, -2.0], np.float32)}
    group = [Trajectory(prompt, (generation,), "", Reward(value), columns) for value in (1.0, 0.0)]
    recipe = of_keys(
        GRPO,
        importance_sampling_level="sequence",
        loss_aggregation="episode_mean",
        clip_low=9e9,
        clip_high=9e9,
        scale_by_std=False,
    )
    batch = Batch.of([recipe.compute_advantages([tuple(group)])[:1]], 4)
    loss, _ = recipe.loss(Given(torch.tensor([[-0.5, -1.0, 0.0, 0.0]])), batch, {})  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(-0.5 * math.exp((0.5 + 1.0) / 2))


def test_a_plugged_recipe_is_given_what_a_built_in_is_given() -> None:
    text = (
        "{recipe: RECIPE, algo: {clip_low: 0.1}, model: {path: m}, data: {sources: {a: {path: a, kind: prompt}}}, "
        "train: {steps: 1, lr: 1e-4, precision: fp32}, "
        "rollout: {reward: {use: a:b}, max_new_tokens: 17, temperature: 0.5}}"
    )
    plugged = build(loads(text.replace("RECIPE", '{use: "ptf.recipes.grpo.recipe:GRPO"}')))
    assert plugged == build(loads(text.replace("RECIPE", "grpo")))
    assert plugged.context.max_new_tokens == 17
    assert plugged.context.processing == LogitsProcessing(0.5, 1.0)
    mine = build(loads(text.replace("RECIPE", '{use: "ptf.recipes.grpo.recipe:GRPO", args: {clip_high: 0.5}}')))
    assert (mine.config.clip_low, mine.config.clip_high) == (0.1, 0.5)  # type: ignore[attr-defined]
