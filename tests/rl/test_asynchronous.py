"""Asynchronous rollouts in a whole run: ages, what is corrected, and the same bits after a resume."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ptf import api, cli
from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.errors import UserError
from ptf.rl import rollouts
from ptf.rl.asynchronous import AsynchronousRollouts
from ptf.rl.cluster import LocalRoleGroup
from ptf.rl.controller import Controller
from ptf.rl.in_flight import InFlight
from ptf.rl.sampler import Sampler
from ptf.rl.weights.verification import SyncError
from tests.rl.faulty import keep_a_tensor_at
from tests.rl.plugs import by_length
from tests.tiny import arithmetic, online
from tests.train.test_loop import facts, train, weights

STEPS = 6


@pytest.fixture
def raw(tmp_path):
    flight = {"max_staleness": 2, "slice_tokens": 2, "generation_batches": 2}
    raw = online(arithmetic(tmp_path), tmp_path, prompts_per_step=6, group_size=3, max_new_tokens=8, **flight)
    raw["train"] |= {"steps": STEPS, "lr": 3e-3}
    raw["track"] = {"tensorboard": False, "samples_every": 1, "sample_prompts": 6}
    raw["checkpoint"] = {"every": 1, "keep": 99}
    return raw


def with_environment(raw, **rollout):
    """The same job with conversations of two turns."""
    more = {"reward": None, "environment": {"use": "tests.rl.environments:Terse"}, "max_turns": 2, **rollout}
    return {**raw, "rollout": {k: v for k, v in {**raw["rollout"], **more}.items() if v is not None}}


def found(directory: Path):
    return facts(directory), read_metrics(directory / "samples.jsonl"), weights(directory)


def same(a, b) -> bool:
    return a[:2] == b[:2] and all(torch.equal(a[2][name], b[2][name]) for name in a[2])


def test_groups_are_at_most_k_versions_old_and_go_on_under_newer_weights(raw, monkeypatch):
    seen = []
    plain = rollouts.outcome_metrics

    def watched(groups, version, *others, **more):
        seen.append((version, groups))
        return plain(groups, version, *others, **more)

    monkeypatch.setattr(rollouts, "outcome_metrics", watched)
    raw["rollout"] |= {"group_size": 2, "max_new_tokens": 24, "slice_tokens": 4}  # of many lengths
    rows, _, _ = found(train(raw, "a"))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    of_tokens = [(step, one.versions) for step, groups in seen for g in groups for t in g for one in t.generations]
    assert all(0 <= step - versions.min() <= 2 for step, versions in of_tokens)
    assert any(versions.min() < versions.max() for _, versions in of_tokens)
    assert {len(groups) for _, groups in seen} == {6}
    assert max(row["staleness_max"] for row in rows) >= 1
    assert all("tis_beyond_share" in row for row in rows), "truncated importance weights are on by default"
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows if "logprob_diff_max" in row), (
        "of the newest tokens alone"
    )


def stop_in_fourth_step(raw, monkeypatch) -> None:
    """Train a run called `stopped` until its fourth update, which fails."""
    update = Controller.update

    def failing(self, units):
        if self.step == 3:
            raise RuntimeError("stopped in the fourth step")
        return update(self, units)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "update", failing)
        with pytest.raises(RuntimeError, match="in the fourth step"):
            train(raw, "stopped")


APART = {"pools": {"training": {"roles": ["policy"]}, "sampling": {"roles": ["rollout"]}}}


@pytest.mark.parametrize(("episodes", "apart"), [(False, False), (True, True)])
def test_a_resumed_run_ends_with_the_same_bits(raw, monkeypatch, episodes, apart):
    raw = with_environment(raw, environment_slices=1) if episodes else raw
    raw["compute"] |= APART if apart else {}
    whole = found(train(raw, "whole"))
    stop_in_fourth_step(raw, monkeypatch)
    assert same(whole, found(train(raw, "stopped")))
    other = {**raw, "rollout": {**raw["rollout"], "slice_tokens": 3}}
    assert not same(whole, found(train(other, "other"))), "negative control"


def test_slices_beside_an_update_are_those_that_run_after_it(raw, monkeypatch):
    """Devices of their own change when slices run, and nothing else."""
    threads = dict[str, list[set[str]]]()

    def train_and_watch(raw, name):
        threads[name] = []
        plain = InFlight.beside_update

        def watched(self, *args):
            threads[name].append({threading.current_thread().name.partition("_")[0]})
            return plain(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(InFlight, "beside_update", watched)
            return found(train(raw, name))

    within = {**raw, "rollout": {**raw["rollout"], "update_slices": 1}}
    after = train_and_watch(within, "after")
    beside = train_and_watch({**raw, "compute": {**raw["compute"], **APART}}, "beside")
    assert threads == {"after": [{"MainThread"}] * STEPS, "beside": [{"slices"}] * STEPS}
    assert same(after, beside)
    assert not same(after, found(train(raw, "none"))), "negative control"
    last = read_metrics(Path(raw["output"]) / "beside" / "metrics.jsonl")[-1]
    assert max(last["seconds/engine_wait"], last["seconds/weights_wait"]) > 0.0
    assert last["update_slices_suggested"] > 0
    spans = read_metrics(Path(raw["output"]) / "beside" / "timeline.jsonl")
    assert [row["step"] for row in spans] == list(range(1, STEPS + 1))
    for row in spans:
        of = {phase: (start, end) for _, phase, start, end in row["phases"]}
        assert 0 <= of["rollout"][1] <= of["update_slices"][0] <= of["update"][0], "the slices begin before the update"
        assert max(of["update_slices"][1], of["update"][1]) <= row["seconds"]


def test_slices_run_after_an_update_where_another_role_may_take_the_engines_devices(raw, monkeypatch):
    """The reference, which is asked while the policy trains, is in the engines' pool."""
    threads, plain = set(), InFlight.beside_update

    def watched(self, *args):
        threads.add(threading.current_thread().name)
        return plain(self, *args)

    monkeypatch.setattr(InFlight, "beside_update", watched)
    pools = {"training": {"roles": ["policy"]}, "sampling": {"roles": ["rollout", "reference"]}}
    raw |= {"algo": {"kl_coef": 0.01}, "compute": {**raw["compute"], "pools": pools}}
    raw["rollout"]["update_slices"] = 1
    train(raw, "a")
    assert threads == {"MainThread"}


def test_engines_that_may_be_sampling_are_not_asked_for_retries(raw, monkeypatch):
    """The environments of training are beside the controller, and count their own."""
    asked, call = [], LocalRoleGroup.call
    monkeypatch.setattr(
        LocalRoleGroup, "call", lambda self, method, *a, **k: asked.append(method) or call(self, method, *a, **k)
    )
    raw["compute"] |= APART
    raw["train"]["steps"] = 2
    rows, _, _ = found(train(with_environment(raw), "a"))
    assert "sample_parts" in asked
    assert "take_retries" not in asked
    assert all(row["rewards_retried"] == 0.0 for row in rows)


def test_another_number_of_slices_beside_an_update_is_refused_on_resume(raw, monkeypatch):
    raw["compute"] |= APART
    stop_in_fourth_step(raw, monkeypatch)
    together = {**raw, "compute": {k: v for k, v in raw["compute"].items() if k != "pools"}}
    with pytest.raises(UserError, match=r"set rollout\.update_slices=1"):
        train(together, "stopped")


@pytest.mark.parametrize("k", [1, 4])
def test_a_wrong_sync_is_caught_by_responses_in_flight_alone(raw, monkeypatch, k):
    """No digest sees it, there are no fixed prompts, and it is caught before the next token."""
    expected = AsynchronousRollouts.responses
    compared = []
    canary = Sampler.canary

    def without_prompts(self, tokens, expected, limits):
        fixed = len(tokens) - len(compared[-1])
        return canary(self, tokens[fixed:], expected[fixed:], limits) if compared[-1] else 0.0

    monkeypatch.setattr(Sampler, "canary", without_prompts)
    keep_a_tensor_at(monkeypatch, version=3)
    monkeypatch.setattr(AsynchronousRollouts, "responses", lambda self: compared.append(expected(self)) or compared[-1])
    raw["train"]["lr"] = 1e-2
    raw["rollout"] |= {"max_staleness": k, "group_size": 2, "max_new_tokens": 48, "in_flight": 6 * (1 + k)}
    with pytest.raises(SyncError, match=r"after weight sync 3 .*responses in flight"):
        train(raw, "a")
    assert [bool(of) for of in compared] == [False, True, True, True]
    assert max(map(len, compared)) == 8
    monkeypatch.setattr(AsynchronousRollouts, "responses", lambda self: compared.append([]) or [])
    with pytest.raises(SyncError, match="sampled tokens"):  # negative control: without them, it is seen a step later
        train(raw, "b")


@pytest.fixture
def walled(raw):
    """A run whose environments take a while, by the wall clock, with engines of their own."""
    raw["compute"] |= APART
    return with_environment(raw, clock="wall", environment={"use": "tests.rl.environments:Dawdling"})


def test_a_run_by_the_wall_clock_is_replayed_to_the_bit(walled, capsys, tmp_path):
    first = train(walled, "first")
    lines = (first / "flight.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("beside_update") for line in lines)
    assert max(row["staleness_max"] for row in read_metrics(first / "metrics.jsonl")) <= 2
    assert cli.main(["replay", str(first)]) == 0
    assert "first-replay has the bits of" in capsys.readouterr().out
    assert same(found(first), found(first.with_name("first-replay")))
    other = train(walled, "other")
    assert (other / "flight.jsonl").read_text().splitlines() != lines, "negative control: it decides otherwise"
    (first / "flight.jsonl").rename(tmp_path / "away")
    assert cli.main(["replay", str(first), "--run-name", "without"]) == 1
    assert "metrics differ" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_by_the_wall_clock_goes_on_with_the_same_bits(walled, monkeypatch):
    """What was decided after the last checkpoint is read back."""
    stop_in_fourth_step(walled, monkeypatch)
    ledger = Path(walled["output"]) / "stopped" / "flight.jsonl"
    decided = ledger.read_text()
    stopped = train(walled, "stopped")
    assert ledger.read_text().startswith(decided)
    assert cli.main(["replay", str(stopped)]) == 0
    train(walled, "other")
    with pytest.raises(UserError, match="does not replay this one"):
        api.replay(stopped, "other")


@pytest.mark.parametrize("failing", ["update", "slices"])
def test_a_fault_of_either_side_ends_the_run(raw, monkeypatch, failing):
    raw["compute"] |= APART

    def fails(*_):
        raise RuntimeError(f"a fault of the {failing}")

    monkeypatch.setattr(*((Controller, "update") if failing == "update" else (InFlight, "beside_update")), fails)
    with pytest.raises(RuntimeError, match=f"a fault of the {failing}"):
        train(raw, "a")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slices")]


@pytest.mark.long
def test_two_replicas_sample_what_one_does(raw):
    """On Ray; batches are fixed, so a replica computes whole ones of them."""
    raw["train"] |= {"steps": 3}
    raw["compute"] = {"launcher": "ray", "workers": 1, "threads": 1, **APART}
    one, two = (
        found(train({**raw, "rollout": {**raw["rollout"], "replicas": replicas}}, f"of-{replicas}"))
        for replicas in (1, 2)
    )
    assert same(one, two)
    local = {**raw["compute"], "launcher": "local"}
    assert same(one, found(train({**raw, "compute": local}, "local")))


def test_without_staleness_nothing_of_it_counts(raw):
    plain = {
        k: v for k, v in raw["rollout"].items() if k not in ("max_staleness", "slice_tokens", "generation_batches")
    }
    rows, _, _ = found(train({**raw, "rollout": plain}, "plain"))
    assert {row["staleness"] for row in rows} == {0.0}
    assert "slices" not in rows[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": "ppo"}, "recipe .*is supported for grpo, and"),
        (
            {"recipe": {"use": "ptf.recipes.grpo.recipe:GRPO"}, "algo": {"tis_cap": None}},
            r"algo\.tis_cap .*must be corrected",
        ),
        ({"algo": {"tis_cap": None}}, r"algo\.tis_cap .*must be corrected"),
        ({"rollout": {"top_p": 0.9}}, r"rollout\.top_p .*must be 1"),
        ({"rollout": {"clock": "wall", "update_slices": 1}}, r"rollout\.environment_slices are for rollout\.clock: vi"),
        ({"rollout": {"in_flight": 5}}, r"rollout\.in_flight .*from 6 .* to 18"),
        ({"rollout": {"in_flight": 19}}, r"rollout\.in_flight .*from 6 .* to 18"),
        ({"rollout": {"max_resampling_rounds": 8}}, "cannot be used with rollout.max_staleness yet"),
        ({"rollout": {"replicas": 3}}, r"rollout\.generation_batches .*at least rollout\.replicas"),
        ({"rollout": {"max_staleness": 0}}, r"rollout\.slice_tokens .*has no effect"),
        (
            {"rollout": {"max_staleness": 0, "slice_tokens": 256, "generation_batches": 1, "update_slices": 1}},
            "update_slices .*no",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(raw, change, words):
    made = {**raw, **change, "rollout": {**raw["rollout"], **change.get("rollout", {})}}
    with pytest.raises(UserError, match=words):
        loads(yaml.safe_dump(made))


def test_rewards_of_a_group_are_those_of_its_own_responses(raw, monkeypatch):
    """Each reward is that of the text that was sampled, whichever versions sampled it."""
    _, samples, _ = found(train(raw, "a"))

    assert len(samples) == STEPS * 18
    scored = [row for row in samples if row["reward"] is not None]
    assert all(np.isclose(row["reward"], by_length(row["row"], row["response"])) for row in scored)
