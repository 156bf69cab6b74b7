"""PPO: advantages and the critic's loss beside verl's own; the loop with a critic runs, resumes to the bit,
and learns."""

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import is_clock, read_metrics
from ptf.config import loads
from ptf.data.batch import Batch
from ptf.data.packing import pack_all
from ptf.data.trajectory import NoResult, Reward
from ptf.errors import UserError
from ptf.recipes.advantages import generalised_advantages
from ptf.recipes.ppo.recipe import PPO, Critic
from tests.rl.test_controller import intercept, train
from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_family import Given, padded
from tests.rl.test_grpo import trajectory


@pytest.fixture
def ppo(raw):
    return {**raw, "recipe": "ppo", "algo": {"num_minibatches": 2, "critic_lr": 3e-3, "value_clip": 10.0}}


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_advantages_are_verls(gamma, lam):
    from verl.trainer.ppo import core_algos

    rng = np.random.default_rng(0)
    lengths, longest = [1, 3, 7, 12], 12
    rewards, values = rng.normal(size=(4, longest)), rng.normal(size=(4, longest))
    mask = np.array([[t < n for t in range(longest)] for n in lengths], float)
    rewards, values = rewards * mask, values * mask
    advantages, returns = core_algos.compute_gae_advantage_return(
        *map(torch.tensor, (rewards, values, mask)), gamma, lam
    )  # type: ignore[arg-type]
    ours = [generalised_advantages(rewards[i, :n], values[i, :n], gamma, lam) for i, n in enumerate(lengths)]
    for i, n in enumerate(lengths):
        assert np.abs(ours[i] + values[i, :n] - returns[i, :n].numpy()).max() <= 1e-6
    flat = np.concatenate(ours)
    # whitened, by the sample's deviation
    theirs = torch.cat([advantages[i, :n] for i, n in enumerate(lengths)]).numpy()
    assert np.abs((flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) - theirs).max() <= 1e-5


def test_with_lambda_1_and_no_values_an_advantage_is_what_is_still_to_come():
    rewards = np.array([0.0, -0.5, 2.0])
    assert generalised_advantages(rewards, np.zeros(3), 1.0, 1.0).tolist() == [1.5, 1.5, 2.0]
    assert generalised_advantages(rewards, np.array([1.0, 1.0, 1.0]), 1.0, 0.0).tolist() == [0.0, -0.5, 1.0]


def scored(n: int = 6) -> list:
    rng = np.random.default_rng(3)
    made = [trajectory(i, Reward(float(i % 3))) for i in range(n)]
    return [
        tuple(
            trajectory(
                i, Reward(float(i % 3)), values=rng.normal(size=len(t.generations[0].sampled_ids)).astype(np.float32)
            )
            for i, t in enumerate(made)
        )
    ]


def test_the_critics_loss_and_gradient_are_verls():
    from verl.trainer.ppo import core_algos

    batch = Batch.of(pack_all(PPO(whiten=False).compute_advantages(scored()), 40), 40)
    g = torch.Generator().manual_seed(0)
    values = (batch.token_columns["values"] + 0.4 * torch.randn(batch.loss_weights.shape, generator=g)).requires_grad_()

    class Says:
        def __call__(self, *given: object) -> torch.Tensor:
            return values

    critic = Critic(0.2)
    loss, metrics = critic.loss(Says(), batch, {})  # type: ignore[arg-type]
    (ours,) = torch.autograd.grad(loss / critic.denominator(batch), values)
    new, returns, old, weights = (
        padded(v, batch)
        for v in (values, batch.token_columns["returns"], batch.token_columns["values"], batch.loss_weights)
    )
    wanted, clipped = core_algos.compute_value_loss(new, returns, old, weights, 0.2)
    (gradient,) = torch.autograd.grad(wanted, values)
    assert float(loss.detach() / critic.denominator(batch)) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert float((ours - gradient).abs().max()) <= 1e-6
    assert float(metrics["clip_share"] / critic.denominator(batch)) == pytest.approx(float(clipped))


def test_the_policys_loss_has_an_advantage_of_every_token_and_failed_answers_none():
    (group,) = scored()
    failed = trajectory(9, NoResult("crashed"), values=np.zeros(9, np.float32))
    units = PPO(whiten=False, gamma=0.9).compute_advantages([(*group, failed)])
    assert len(units) == len(group)
    for (sample,), t in zip(units, group, strict=True):
        rewards = np.zeros(len(t.generations[0].sampled_ids))
        rewards[-1] = t.outcome.value
        wanted = generalised_advantages(rewards, t.token_columns["values"], 0.9, 0.95)
        assert sample.token_columns["advantages"][-len(wanted) :] == pytest.approx(wanted, abs=1e-6)
        assert sample.token_columns["returns"][-len(wanted) :] == pytest.approx(
            wanted + t.token_columns["values"], abs=1e-6
        )
    whitened = np.concatenate(
        [unit[0].token_columns["advantages"][unit[0].loss_weights != 0] for unit in PPO().compute_advantages([group])]
    )
    assert (float(whitened.mean()), float(whitened.std())) == pytest.approx((0, 1), abs=1e-5)
    assert PPO().compute_advantages([(failed,)]) == []
    loss, _ = PPO(whiten=False).loss(Given(torch.zeros(1, 40)), Batch.of([pack_all(units[:1], 40)[0]], 40), {})
    assert torch.isfinite(loss)


def test_kl_is_taken_from_every_tokens_reward():
    t = trajectory(4, Reward(1.0), values=np.zeros(6, np.float32))
    found = PPO(kl_coef=0.5, kl_estimator="k1").rewards(t)
    cost = 0.5 * (t.token_columns["old_logprobs"] - t.token_columns["reference_logprobs"])
    wanted = -cost
    wanted[-1] += 1
    assert found == pytest.approx(wanted, abs=1e-6)


def test_it_runs_warms_the_critic_up_and_resumes_to_the_bit(ppo, monkeypatch):
    ppo["algo"] |= {"critic_warmup": 2, "kl_coef": 0.01}
    whole = train(ppo, "whole")
    rows = read_metrics(whole / "metrics.jsonl")
    assert ["loss" in row for row in rows] == [False, False, True, True, True, True]
    assert all(
        {"critic_loss", "critic_error", "critic_value", "seconds/values", "seconds/critic"} <= row.keys()
        for row in rows
    )
    assert all(row["logprob_diff_max"] <= 1e-5 for row in rows)
    with monkeypatch.context() as patch:

        def dies(call, minibatches, step, *bound):
            if step == 5:
                raise KeyboardInterrupt
            return call(minibatches, step, *bound)

        intercept(patch, "update", dies)
        with pytest.raises(KeyboardInterrupt):
            train(ppo, "stopped")
    resumed = train(ppo, "stopped")
    facts = [
        [{k: v for k, v in r.items() if not is_clock(k)} for r in read_metrics(d / "metrics.jsonl")]
        for d in (whole, resumed)
    ]
    assert facts[0] == facts[1]


@pytest.mark.cluster
def test_it_learns_and_its_critic_too(ppo):
    ppo["train"] |= {"steps": 40, "lr": 3e-3, "validate_every": 0, "schedule": "constant"}
    ppo["checkpoint"] = {"every": 40}
    rows = read_metrics(train(ppo) / "metrics.jsonl")
    assert sum(r["reward"] for r in rows[-5:]) / 5 > rows[0]["reward"] + 0.3
    error = [row["critic_error"] for row in rows]
    assert sum(error[-5:]) < 0.5 * sum(error[:5])


def test_a_critic_needs_our_own_decoder(ppo):
    with pytest.raises(UserError, match=r"model\.backend +hf has no recipe ppo"):
        loads(
            yaml.safe_dump(
                {
                    **ppo,
                    "model": {"path": "m", "backend": "hf"},
                    "rollout": ppo["rollout"] | {"engine": "vllm"},
                    "compute": {},
                }
            )
        )
