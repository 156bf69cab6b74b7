"""The online loop in one process: it runs, resumes, and stops at every wrong weight before a token is sampled from
it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import frozen_differences, loads
from ptf.data.trajectory import Reward, Trajectory
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.recipes.grpo.recipe import GRPO
from ptf.rl.cluster import LocalRoleGroup
from ptf.rl.engines.native import NativeEngine
from ptf.rl.rollouts import reward_source, rewards_differ
from ptf.rl.sampler import Sampler
from ptf.rl.weights.verification import SyncError
from ptf.tasks import calculator
from tests.rl.faulty import keep_a_tensor_at
from tests.tiny import arithmetic, online
from tests.train.test_loop import facts, same, train, weights


@pytest.fixture
def raw(tmp_path):
    raw = online(arithmetic(tmp_path), tmp_path, prompts_per_step=8) | {"algo": {"num_minibatches": 2}}
    raw["evaluate"] = {"sources": {"dev": raw["data"]["sources"]["p"]}, "limit": 20}
    raw["train"] |= {"steps": 6, "validate_every": 3}
    raw["checkpoint"] = {"every": 2}
    return raw


def intercept(monkeypatch, method: str, wrapper) -> None:
    """Replace a method of a role by a function that gets the original one."""
    call = LocalRoleGroup.call

    def intercepted(self, name, *args, **options):
        if name != method:
            return call(self, name, *args, **options)
        return wrapper(lambda *a: call(self, name, *a, **options), *args)

    monkeypatch.setattr(LocalRoleGroup, "call", intercepted)


def die_in_step(monkeypatch, number: int, training: Callable[[], object]) -> None:
    """Run a training that is interrupted before the update of this step, counted from 0."""

    def dies(call, minibatches, step, *bound):
        if step == number:
            raise KeyboardInterrupt
        return call(minibatches, step, *bound)

    with monkeypatch.context() as patch:
        intercept(patch, "update", dies)
        with pytest.raises(KeyboardInterrupt):
            training()


def watch_sampling(monkeypatch) -> list[int]:
    """Return a list of the weight versions from which answers were generated."""
    seen: list[int] = []
    played = Sampler._run_episodes

    def noting(self, episodes):
        for ended in played(self, episodes):
            for _, trajectory in ended:
                seen.extend(v for generation in trajectory.generations for v in generation.versions.tolist())
            yield ended

    monkeypatch.setattr(Sampler, "_run_episodes", noting)
    return seen


def test_it_runs_and_agrees_with_its_engine(raw):
    rows = read_metrics(train({**raw, "algo": {"num_minibatches": 2, "kl_coef": 0.01}}) / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 7))
    assert all(r["logprob_diff_max"] <= 1e-5 and r["canary_logprob_diff_max"] <= 1e-5 for r in rows)
    assert all(r["sync_tensors"] == 24 for r in rows)
    assert [r["step"] for r in rows if "greedy_pass_rate/dev" in r] == [3, 6]
    assert rows[0]["kl_reference"] < rows[-1]["kl_reference"]
    assert {"seconds/rollout", "seconds/update", "seconds/sync", "entropy", "clip_share"} <= rows[0].keys()
    assert {"response_length", "truncated_share", "no_result_share"} <= rows[0].keys()


def test_what_was_truncated_is_a_share_of_the_episodes_with_a_result(raw, monkeypatch):
    seen, credit = list[Trajectory](), GRPO.compute_advantages

    def noting(self, groups):
        seen.extend(t for group in groups for t in group)
        return credit(self, groups)

    monkeypatch.setattr(GRPO, "compute_advantages", noting)
    raw["train"] |= {"steps": 1, "validate_every": 0}
    reward = {"use": "tests.rl.plugs:of_finished_or_odd"}
    raw["rollout"] |= {"max_new_tokens": 2, "reward": reward, "reward_retries": 0, "max_no_result_share": 0.9}
    (row,) = read_metrics(train({**raw, "evaluate": {}}) / "metrics.jsonl")
    with_result = [t for t in seen if isinstance(t.outcome, Reward)]
    assert 0 < len(with_result) < len(seen)
    assert row["truncated_share"] == sum(not t.complete for t in with_result) / len(with_result)
    assert 0 < row["truncated_share"] < sum(not t.complete for t in seen) / len(seen)


def test_an_engine_is_told_before_it_sleeps_that_new_weights_come(raw, monkeypatch):
    """So that vLLM discards the old ones, instead of keeping them in host memory until they are replaced."""
    calls = list[str]()
    call = LocalRoleGroup.call

    def noted(self, name, *args, **options):
        if self.spec.name == "rollout":
            calls.append(name)
        return call(self, name, *args, **options)

    monkeypatch.setattr(LocalRoleGroup, "call", noted)
    raw["train"] = {**raw["train"], "steps": 3, "validate_every": 0}
    train({**raw, "evaluate": {}})
    order = [name for name in calls if name in ("rollout", "expect_weights", "load")]
    assert order[:1] == ["load"]
    assert order[1:] == ["rollout", "expect_weights", "load"] * 3


@pytest.mark.long
def test_it_learns_what_the_reward_asks_for(raw):
    raw = {**raw, "train": {**raw["train"], "steps": 30, "lr": 3e-3, "validate_every": 0, "schedule": "constant"}}
    raw["checkpoint"] = {"every": 30}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert sum(r["reward"] for r in rows[-5:]) / 5 > rows[0]["reward"] + 0.3


@pytest.mark.long
def test_groups_of_equal_rewards_are_replaced_where_that_is_asked_for(raw, monkeypatch):
    """About half of the prompts have such groups: without replacement, fewer groups are trained."""
    trained: dict[int, list[int]] = {0: [], 8: []}  # by the largest number of rounds
    credit = GRPO.compute_advantages
    for rounds in trained:
        with monkeypatch.context() as patch:

            def noting(self, groups, rounds=rounds):
                trained[rounds].append(sum(map(rewards_differ, groups)))
                return credit(self, groups)

            patch.setattr(GRPO, "compute_advantages", noting)
            rollout = raw["rollout"] | {
                "reward": {"use": "tests.rl.plugs:of_odd_sums"},
                "max_resampling_rounds": rounds,
            }
            rows = read_metrics(train({**raw, "rollout": rollout}, f"rounds-{rounds}") / "metrics.jsonl")
        assert 0.2 < sum(row["zero_variance_share"] for row in rows) / len(rows) < 0.8
    assert trained[8] == [8] * 6
    assert max(trained[0]) < 8


def test_a_reward_that_never_differs_ends_the_run_where_equal_groups_are_replaced(raw):
    raw["rollout"] |= {"reward": {"use": "tests.rl.plugs:constant"}, "max_resampling_rounds": 3}
    said = r"step 1: in each of 24 groups all responses have the same reward, in 3 rounds .*The mean reward is 0\.5"
    with pytest.raises(UserError, match=said):
        train(raw)


@pytest.mark.long
def test_a_task_that_has_been_learned_is_no_fault(raw, capsys):
    raw["rollout"] |= {"reward": {"use": "tests.rl.plugs:settles"}, "max_resampling_rounds": 2}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert "in each of 16 groups all responses have the same reward, in 2 rounds" in capsys.readouterr().out
    assert rows[0]["zero_variance_share"] < 1
    assert [row["zero_variance_share"] for row in rows[3:]] == [1.0] * 3


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_bits(raw, monkeypatch):
    whole = train(raw, "whole")
    die_in_step(monkeypatch, 3, lambda: train(raw, "stopped"))
    resumed = train(raw, "stopped")
    assert same(weights(whole), weights(resumed))
    assert facts(whole) == facts(resumed)


@pytest.mark.long
def test_steps_without_a_response_to_train_on_are_skipped_and_too_many_end_the_run(raw, monkeypatch):
    monkeypatch.setattr("ptf.rl.controller.MOST_SKIPPED", 4)
    monkeypatch.setattr("ptf.recipes.grpo.recipe.GRPO.is_trained", lambda self, _: not self.config.overlong_filter)
    raw["algo"]["overlong_filter"] = True  # as if every response were truncated
    for _ in range(2):  # the second time from the checkpoint of step 2, which knows how many were skipped
        with pytest.raises(UserError, match=r"step 4: .*, in 4 steps in a row: .* may change on resume"):
            train(raw)
    raw["algo"]["overlong_filter"], raw["rollout"]["max_new_tokens"] = False, 5
    directory = train(raw)
    rows = {row["step"]: row for row in read_metrics(directory / "metrics.jsonl")}
    assert [rows[step].get("skipped", 0.0) for step in range(1, 7)] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert "loss" not in rows[2]
    assert "grad_norm" in rows[3]
    stored = (directory / "job.yaml").read_text()
    assert "overlong_filter: false\n" in stored
    assert "max_new_tokens: 5\n" in stored


def test_a_step_without_any_result_is_skipped_where_the_share_allows_it(raw):
    raw["rollout"] |= {"reward": {"use": "tests.rl.plugs:crashes"}, "max_no_result_share": 1.0}
    raw["train"]["steps"], raw["train"]["validate_every"] = 2, 0
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert [(row["skipped"], row["no_result_share"]) for row in rows] == [(1.0, 1.0)] * 2
    assert all("reward" not in row for row in rows)
    lower = {**raw, "rollout": {**raw["rollout"], "max_no_result_share": 0.5}}
    assert not frozen_differences(*(loads(yaml.safe_dump(each)) for each in (raw, lower)))


@pytest.mark.long
def test_what_recipes_draw_from_torch_is_drawn_again(raw, monkeypatch):
    noisy = {
        **raw,
        "recipe": {"use": "tests.train.recipes:NoisyGRPO", "args": {"num_minibatches": 2}},
        "algo": {},
        "train": {**raw["train"], "validate_every": 0},
    }
    torch.manual_seed(0)
    whole = facts(train(noisy, "whole"))
    torch.manual_seed(1)
    die_in_step(monkeypatch, 3, lambda: train(noisy, "stopped"))
    torch.manual_seed(9)
    assert facts(train(noisy, "stopped")) == whole
    rows = read_metrics(train({**noisy, "recipe": "grpo", "algo": {"num_minibatches": 2}}, "plain") / "metrics.jsonl")
    assert [row["grad_norm"] for row in rows] != [row["grad_norm"] for row in whole]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["lost", "garbled", "old"])
def test_a_wrong_sync_is_caught_before_a_token_is_sampled(raw, fault, monkeypatch):
    kept = {}

    def faulty(call, buckets, manifest):
        kept[manifest.version] = (buckets, manifest)
        if manifest.version != 3:
            return call(buckets, manifest)
        if fault == "lost":
            return type("Receipt", (), {"version": 3, "tensors": 24})()  # a transport that says it delivered
        if fault == "garbled":
            wrong = buckets[0][0][1].clone()
            wrong.view(torch.uint8).view(-1)[12345 % wrong.nbytes] ^= 1
            return call([[(buckets[0][0][0], wrong), *buckets[0][1:]], *buckets[1:]], manifest)
        return call(kept[2][0], manifest)

    intercept(monkeypatch, "load", faulty)
    seen = watch_sampling(monkeypatch)
    with pytest.raises(SyncError):
        train(raw)
    assert set(seen) == {0, 1, 2}


def test_an_engine_that_computes_with_other_weights_is_caught_by_the_canary(raw, monkeypatch):
    """What digests cannot see: the tensors arrive, but a part of the engine keeps a packed copy of the old ones."""
    keep_a_tensor_at(monkeypatch, version=3)
    raw["train"]["lr"] = 1e-2
    seen = watch_sampling(monkeypatch)
    with pytest.raises(SyncError, match="canary"):
        train(raw)
    assert 3 not in seen


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_are_sent_in_the_precision_of_the_engine(raw, monkeypatch, precision, dtype):
    sent = []

    def seen(call, buckets, manifest):
        sent.extend(tensor for bucket in buckets for _, tensor in bucket)
        return call(buckets, manifest)

    intercept(monkeypatch, "load", seen)
    raw["train"] |= {"precision": precision, "steps": 1, "validate_every": 0}
    train(raw)
    assert sent
    assert {tensor.dtype for tensor in sent} == {dtype}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tensor_that_the_native_engine_did_not_load_is_found_in_what_it_holds(raw, monkeypatch, precision):
    """The tensors arrive, and one of them is not copied; the difference is far below what log-probs show."""
    load, seen = Decoder.load_hf_tensors, watch_sampling(monkeypatch)
    name = "model.layers.0.mlp.down_proj.weight"
    before: dict[str, torch.Tensor] = {}

    def stale(model, tensors):
        tensors = dict(tensors)
        before[name], tensors[name] = tensors[name], before.get(name, tensors[name])
        load(model, tensors)

    monkeypatch.setattr(Decoder, "load_hf_tensors", stale)
    raw["train"] |= {"precision": precision, "lr": 1e-4}
    with pytest.raises(SyncError, match=rf"weight sync 1 failed: .* in 1 tensors: .'{name}'"):
        train(raw)
    assert set(seen) == {0}


def test_a_reward_that_always_crashes_stops_the_run_and_says_why(raw):
    raw["rollout"]["reward"]["use"] = "tests.rl.plugs:crashes"
    with pytest.raises(UserError, match="no connection to the judge"):
        train(raw)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_or_dropped(raw, tmp_path):
    raw["data"]["seq_len"] = 16
    with pytest.raises(UserError, match=r"less rollout\.max_new_tokens leaves 10"):
        train(raw)
    raw["data"]["too_long"] = "drop"
    raw["train"]["steps"] = 1
    assert len(read_metrics(train(raw, "b") / "metrics.jsonl")) == 1  # sums of one digit fit


def test_an_evaluation_most_of_whose_rewards_crash_is_no_evaluation(raw):
    raw["evaluate"]["reward"] = {"use": "tests.rl.plugs:often_crashes"}
    with pytest.raises(UserError, match="held-out responses have no result"):
        train(raw)


@pytest.mark.long
def test_an_agent_with_a_tool_is_trained(raw, tmp_path):
    calculator.prepare(str(tmp_path / "task"))
    raw["model"]["path"] = str(tmp_path / "task" / "model")
    raw["data"]["sources"] = {"sums": {"path": str(tmp_path / "task" / "train.jsonl"), "kind": "prompt"}}
    raw["evaluate"]["sources"] = {"test": {"path": str(tmp_path / "task" / "test.jsonl"), "kind": "prompt"}}
    del raw["rollout"]["reward"]
    raw["rollout"] |= {"max_new_tokens": 4, "reward_processes": 2}
    raw["rollout"]["environment"] = {"use": "tests.rl.obliging:Obliging"}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert all(r["turns"] == 2 and r["logprob_diff_max"] <= 1e-5 and r["no_result_share"] == 0 for r in rows)
    assert "greedy_reward/test" in rows[-1]


def test_an_interrupt_while_it_generates_is_that_and_nothing_else(raw, monkeypatch):
    def interrupted(self, requests):
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeEngine, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(raw)
    assert stopped.value.__context__ is None


def test_a_reward_of_groups_gets_all_answers_to_a_prompt_and_their_episodes(raw, tmp_path):
    """In training those of the group, in validation the greedy answer."""
    raw["rollout"]["reward"] = {"use": "tests.rl.rewards.shapes:noted", "args": {"place": str(tmp_path / "noted")}}
    raw["train"] |= {"steps": 1, "validate_every": 1}
    (row,) = read_metrics(train(raw) / "metrics.jsonl")
    assert row["no_result_share"] == row["no_result_share/dev"] == 0
    assert row["reward"] > 1
    assert Counter((tmp_path / "noted").read_text().splitlines()) == {"4 p 0": 8, "1 dev 1": 20}


def test_rewards_are_told_by_source(raw, tmp_path):
    """With several sources, the metrics contain the mean reward of each."""
    (row,) = read_metrics(train({**raw, "train": {**raw["train"], "steps": 1}}) / "metrics.jsonl")
    assert row["staleness"] == 0
    assert not any(name.startswith("source_reward/") for name in row)
    prompt = {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}
    raw["data"]["sources"] = {"p": prompt, "q": prompt}
    rows = read_metrics(train({**raw, "train": {**raw["train"], "steps": 3}}, "two") / "metrics.jsonl")
    for row in rows:
        assert {name for name in row if name.startswith("source_reward/")} == {"source_reward/p", "source_reward/q"}
        assert row["reward"] == pytest.approx((row["source_reward/p"] + row["source_reward/q"]) / 2)
    assert any(row["source_reward/p"] != row["source_reward/q"] for row in rows)


def shifted(trajectory: Trajectory, by: float) -> Trajectory:
    """Return it with another log-prob of the first token of each generation."""
    generations = (
        replace(one, logprobs=one.logprobs - np.float32(by) * (np.arange(len(one.logprobs)) == 0))
        for one in trajectory.generations
    )
    return replace(trajectory, generations=tuple(generations))


@pytest.mark.long
@pytest.mark.parametrize("algo", [{}, {"num_minibatches": 2}])
def test_log_probs_of_the_engine_that_are_not_the_policys_stop_the_run_before_anything_is_trained(
    raw, monkeypatch, algo
):
    """The log-probs are compared before the update, or in it if it is the step's only one."""
    steps = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *more: steps.append(self))

    def off(call, *args):
        return [tuple(shifted(t, 0.01) for t in group) for group in call(*args)]

    intercept(monkeypatch, "rollout", off)
    said = r"step 1: the engine's and the trainer's log-probs of the sampled tokens differ by 0\.00"
    with pytest.raises(SyncError, match=said):
        train({**raw, "algo": algo})
    assert not steps


@pytest.mark.parametrize("algo", [{}, {"num_minibatches": 2}])
def test_in_bf16_one_token_that_rounding_explains_does_not_stop_the_run(raw, monkeypatch, algo):
    """The largest of many differences passes any bound; it is reported."""

    def off(call, *args):
        groups = call(*args)
        first, *others = groups[0]
        return [(shifted(first, 0.7), *others), *groups[1:]]

    intercept(monkeypatch, "rollout", off)
    train_section = {**raw["train"], "precision": "bf16", "steps": 1, "validate_every": 0}
    (row,) = read_metrics(train({**raw, "algo": algo, "train": train_section}) / "metrics.jsonl")
    assert 0.6 < row["logprob_diff_max"] < 0.8
    assert 0 < row["logprob_diff_share"] < 0.02
    assert 0 < row["logprob_diff_mean"] < 0.1
    assert "tis_beyond_share" in row  # tis_cap: auto


def test_a_single_update_does_not_need_its_log_probs_ahead(raw):
    """It is the same step with and without."""
    found = {}
    for name, algo in (("once", {}), ("ahead", {"kl_coef": 1e-12, "kl_in": "reward"})):
        found[name] = read_metrics(
            train({**raw, "algo": algo, "train": {**raw["train"], "steps": 3}}, name) / "metrics.jsonl"
        )
    assert not any("seconds/logprobs" in row for row in found["once"])
    assert all("seconds/logprobs" in row for row in found["ahead"])
    for a, b in zip(found["once"], found["ahead"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["logprob_diff_max"] <= 1e-5
        assert a["reward"] == b["reward"]


def test_what_was_said_and_credited_can_be_read(raw, monkeypatch):
    raw = {**raw, "track": {**raw.get("track", {}), "samples_every": 2, "sample_prompts": 3}}
    credited = []
    credit = GRPO.compute_advantages
    monkeypatch.setattr(
        GRPO, "compute_advantages", lambda self, groups: credited.append(credit(self, groups)) or credited[-1]
    )
    run = train(raw)
    rows = read_metrics(run / "samples.jsonl")
    # three prompts of four answers
    assert [row["step"] for row in rows] == [step for step in (1, 2, 4, 6) for _ in range(12)]
    for row, (sample,) in zip(rows[:12], credited[0], strict=False):
        trained = sample.token_columns["advantages"][sample.loss_weights != 0]
        assert [token[2] for token in row["tokens"]] == trained.tolist()
        assert "".join(token[0] for token in row["tokens"]).removesuffix("<|im_end|>") == row["response"]
        assert {"row", "reward", "no_result", "complete", "turns"} <= row.keys()
    (run / "samples.jsonl").open("a").write('{"step": 9, "answer": "cut sh')
    assert len(read_metrics(run / "samples.jsonl")) == len(rows)


def test_weights_by_path_are_those_by_memory(raw):
    raw["train"]["steps"] = 3
    found = {}
    for transport in ("object_store", "files"):
        raw["rollout"]["transport"] = transport
        made = train(raw, transport)
        found[transport] = facts(made)
        assert not (made / "sync").exists(), "nothing is left"
    assert found["files"] == found["object_store"]


@pytest.mark.parametrize("change", ["template", "stops"])
def test_another_tokenizer_is_refused_on_resume(raw, monkeypatch, tmp_path, change):
    """Whether it gives other ids or ends answers otherwise; the controls are the resumes above."""
    train({**raw, "train": {**raw["train"], "steps": 2, "validate_every": 0}})
    if change == "template":
        file = tmp_path / "model" / "chat_template.jinja"
        file.write_text(file.read_text() + "\n")
        said = "another tokenizer than the model's: they differ in their chat template"
    else:
        (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [5]}')
        said = r"responses ended with \[.*\], now with \[.*generation_config.json"
    with pytest.raises(UserError, match=said):
        train({**raw, "train": {**raw["train"], "steps": 2, "validate_every": 0}})


@pytest.mark.parametrize(
    ("harness", "play", "reward", "model", "named"),
    [
        (True, None, None, False, "the harness"),
        (False, "a:play", None, False, "the rollout function a:play"),
        (False, None, "b:score", False, "the reward b:score"),
        (False, None, None, True, "the reward model"),
        (False, "a:play", "b:score", False, "the rollout function a:play or the reward b:score"),
        (False, None, None, False, "the environment c:E, d:E"),
    ],
)
def test_messages_name_what_gave_the_reward(harness, play, reward, model, named):
    environments = {"x": SimpleNamespace(use="c:E"), "y": SimpleNamespace(use="d:E")}
    config: Any = SimpleNamespace(
        harness=harness,
        play=play and SimpleNamespace(use=play),
        reward={"": SimpleNamespace(use=reward)} if reward else {},
        reward_model=model,
        environment=environments,
    )
    assert reward_source(config) == named
