"""PPO: advantages and the critic's loss beside verl's own; the loop with a critic runs, resumes to the bit,
and learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.packing import pack_all
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory, last_sample_of, samples_of
from ptf.recipes.documents import last_values
from ptf.recipes.ppo.recipe import PPO, generalised_advantages
from ptf.rl.forward_passes import per_document, per_token
from ptf.train.trainer import load_model
from tests.recipes.of_keys import of_keys
from tests.rl.test_controller import die_in_step, intercept, train
from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_family import Given, padded
from tests.rl.test_grpo import trajectory
from tests.tiny import checkpoint
from tests.train.test_loop import facts


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
    values = [rng.normal(size=len(t.generations[0].sampled_ids)).astype(np.float32) for t in made]
    return [tuple(trajectory(i, Reward(float(i % 3)), values=of) for i, of in enumerate(values))]


def test_the_critics_loss_and_gradient_are_verls():
    from verl.trainer.ppo import core_algos

    batch = Batch.of(pack_all(of_keys(PPO).compute_advantages(scored()), 40), 40)
    g = torch.Generator().manual_seed(0)
    values = (batch.token_columns["values"] + 0.4 * torch.randn(batch.loss_weights.shape, generator=g)).requires_grad_()

    class Says:
        def __call__(self, *given: object, **named: object) -> torch.Tensor:
            return values

    critic = of_keys(PPO, value_clip=0.2).critic
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
    units = of_keys(PPO, gamma=0.9).compute_advantages([(*group, failed)])
    assert len(units) == len(group)
    raw = []
    for t in group:
        rewards = np.zeros(len(t.generations[0].sampled_ids))
        rewards[-1] = t.outcome.value
        raw.append(generalised_advantages(rewards, t.token_columns["values"], 0.9, 0.95))
    mean, std = np.concatenate(raw).mean(), np.concatenate(raw).std()
    for (sample,), t, wanted in zip(units, group, raw, strict=True):
        whitened = (wanted - mean) / std
        assert sample.token_columns["advantages"][-len(wanted) :] == pytest.approx(whitened, abs=1e-5)
        assert sample.token_columns["returns"][-len(wanted) :] == pytest.approx(
            wanted + t.token_columns["values"], abs=1e-6
        )
    units = of_keys(PPO).compute_advantages([group])
    whitened = np.concatenate([unit[0].token_columns["advantages"][unit[0].loss_weights != 0] for unit in units])
    assert (float(whitened.mean()), float(whitened.std())) == pytest.approx((0, 1), abs=1e-5)
    assert of_keys(PPO).compute_advantages([(failed,)]) == []
    loss, _ = of_keys(PPO).loss(Given(torch.zeros(1, 40)), Batch.of([pack_all(units[:1], 40)[0]], 40), {})
    assert torch.isfinite(loss)


def test_kl_is_taken_from_every_tokens_reward():
    t = trajectory(4, Reward(1.0), values=np.zeros(6, np.float32))
    found = of_keys(PPO, kl_coef=0.5, kl_estimator="k1").rewards(t)
    cost = 0.5 * (t.token_columns["old_logprobs"] - t.token_columns["reference_logprobs"])
    wanted = -cost
    wanted[-1] += 1
    assert found == pytest.approx(wanted, abs=1e-6)


def of_turns(*lengths: int, **fields) -> Trajectory:
    """Return an episode of turns with these numbers of sampled tokens, and random values."""
    generations, context = [], np.array([1, 2], np.int32)
    for n in lengths:
        ids = np.full(n, 3, np.int32)
        generations.append(Generation(context, ids, np.zeros(n, np.float32), np.zeros(n, np.int32), True))
        context = np.concatenate([context, ids, np.array([4], np.int32)])
    values = np.random.default_rng(1).normal(size=sum(lengths)).astype(np.float32)
    prompt = Prompt(np.array([1, 2], np.int32), {}, "a", 0)
    return Trajectory(prompt, tuple(generations), "", **{"token_columns": {"values": values}, **fields})


def test_the_reward_of_a_turn_is_at_its_last_token():
    t = of_turns(2, 1, 3, outcome=Reward(1.5), turn_rewards=np.array([0.5, -1.0, 2.0]))
    assert of_keys(PPO, credit_level="turn").rewards(t).tolist() == [0, 0.5, -1.0, 0, 0, 2.0]
    assert of_keys(PPO).rewards(t).tolist() == [0, 0, 0, 0, 0, 1.5]  # the default
    assert of_keys(PPO, credit_level="turn").rewards(replace(t, turn_rewards=None)).tolist() == [0, 0, 0, 0, 0, 1.5]
    recipes = [of_keys(PPO, credit_level=at, lam=1.0) for at in ("turn", "episode")]
    found, before = (recipe.compute_advantages([(t,)]) for recipe in recipes)
    # what a token is credited with is what follows it, and no longer what came before
    returns = [unit[0][0].token_columns["returns"][unit[0][0].loss_weights != 0] for unit in (found, before)]
    assert returns[0] == pytest.approx([1.5, 1.5, 1.0, 2.0, 2.0, 2.0], abs=1e-6)
    assert returns[1] == pytest.approx([1.5] * 6, abs=1e-6)


def test_a_critic_encodes_no_rows():
    with pytest.raises(NotImplementedError, match="trains on what the policy sampled"):
        of_keys(PPO).critic.encode({"prompt": "a"}, None, "a source")  # type: ignore[arg-type]


def test_what_was_truncated_is_bootstrapped_with_the_critics_value():
    t = of_turns(3, outcome=Reward(0.5), complete=False, value_after=2.0)
    values = t.token_columns["values"].astype(float)
    (unit,) = of_keys(PPO, gamma=0.9, lam=0.8).compute_advantages([(t,)])
    errors = np.array([0.0, 0.0, 0.5]) + 0.9 * np.append(values[1:], 2.0) - values
    wanted = [sum((0.9 * 0.8) ** (u - i) * errors[u] for u in range(i, 3)) for i in range(3)]
    assert unit[0].token_columns["returns"][-3:] == pytest.approx(wanted + values, abs=1e-6)
    (plain,) = of_keys(PPO, gamma=0.9, lam=0.8).compute_advantages([(replace(t, value_after=None),)])
    assert plain[0].token_columns["returns"][-1] == pytest.approx(0.5, abs=1e-6)
    assert of_keys(PPO, overlong_filter=True).compute_advantages([(t,)]) == []
    assert len(of_keys(PPO, overlong_filter=True).compute_advantages([(replace(t, complete=True), t)])) == 1


def test_the_last_sample_of_an_episode_ends_with_its_last_token():
    """Of an episode whose second turn begins anew, and whose third continues the first."""
    first, anew, third = of_turns(2, 1, outcome=Reward(0.0)).generations, of_turns(3).generations[0], of_turns(2, 1, 2)
    anew = replace(anew, context=np.array([9], np.int32))
    whole = of_turns(2, outcome=Reward(0.0))
    made = replace(whole, generations=(first[0], anew, third.generations[1]), token_columns={})
    assert len(samples_of(made)) == 2
    assert last_sample_of(made).tokens.tolist() == [1, 2, 3, 3, 4, 3]
    made = replace(made, generations=made.generations[:2])
    assert last_sample_of(made).tokens.tolist() == [9, 3, 3, 3]


def test_a_run_computes_the_value_after_what_was_truncated(ppo, monkeypatch):
    """And only of that."""
    seen, asked, credit = list[Trajectory](), [], PPO.compute_advantages

    def noting(self, groups):
        seen.extend(t for group in groups for t in group)
        return credit(self, groups)

    monkeypatch.setattr(PPO, "compute_advantages", noting)
    intercept(monkeypatch, "last_values", lambda call, samples: asked.append((samples, call(samples))) or asked[-1][1])
    ppo["train"] |= {"steps": 1, "validate_every": 0}
    ppo["rollout"]["max_new_tokens"] = 2
    train({**ppo, "evaluate": {}, "algo": {**ppo["algo"], "bootstrap_truncated": True}})
    ((samples, values),) = asked
    cut = [t for t in seen if not t.complete]
    assert 0 < len(cut) < len(seen)
    assert [s.tokens.tolist() for s in samples] == [last_sample_of(t).tokens.tolist() for t in cut]
    assert [t.value_after for t in cut] == values
    assert len({*values}) > 1
    assert all(t.value_after is None for t in seen if t.complete)
    assert not of_keys(PPO).critic.bootstrap_truncated


def test_the_value_after_a_sample_is_that_before_the_token_that_would_follow(tmp_path):
    """Beside the values of samples that are one token longer."""
    place = checkpoint(tmp_path / "m")
    critic = load_model(place, World(), ModelConfig(path=str(place)), seed=0, precision="fp32", head="scalar")
    units = of_keys(PPO).compute_advantages(scored())
    samples = [sample for (sample,) in units]
    longer = [Document(np.append(s.tokens, 5).astype(np.int32), np.ones(len(s) + 1, np.float32)) for s in samples]
    arguments = {"seq_len": 40, "micro_batch_sequences": 2}
    after = per_document(critic, samples, World(), last_values, **arguments)
    before = per_token(critic, longer, World(), lambda batch, x, head: head.values(x), **arguments)
    assert after == pytest.approx([float(values[-1]) for values in before], abs=1e-5)
    assert after != pytest.approx([float(values[-2]) for values in before], abs=1e-3)


@pytest.mark.long
def test_it_runs_warms_the_critic_up_and_resumes_to_the_bit(ppo, monkeypatch):
    ppo["algo"] |= {"critic_warmup": 2, "kl_coef": 0.01}
    whole = train(ppo, "whole")
    rows = read_metrics(whole / "metrics.jsonl")
    assert ["loss" in row for row in rows] == [False, False, True, True, True, True]
    assert all(
        {"critic_loss", "critic_value_mse", "critic_value", "seconds/values", "seconds/critic"} <= row.keys()
        for row in rows
    )
    assert all(row["logprob_diff_max"] <= 1e-5 for row in rows)
    die_in_step(monkeypatch, 5, lambda: train(ppo, "stopped"))
    assert facts(train(ppo, "stopped")) == facts(whole)


@pytest.mark.cluster
def test_it_learns_and_its_critic_too(ppo):
    ppo["train"] |= {"steps": 40, "lr": 3e-3, "validate_every": 0, "schedule": "constant"}
    ppo["checkpoint"] = {"every": 40}
    rows = read_metrics(train(ppo) / "metrics.jsonl")
    assert sum(r["reward"] for r in rows[-5:]) / 5 > rows[0]["reward"] + 0.3
    error = [row["critic_value_mse"] for row in rows]
    assert sum(error[-5:]) < 0.5 * sum(error[:5])
