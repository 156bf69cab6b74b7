"""Runs whose answers are restricted: to a file's lines, to a nucleus, to both."""

import contextlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import ConfigError, loads
from ptf.data.trie import Trie
from ptf.errors import UserError
from ptf.model.chunked import token_logprobs
from ptf.model.head import Head
from ptf.model.sampling import LogitsProcessing
from ptf.recipes.grpo.recipe import GRPO
from ptf.rl import online_job
from ptf.rl.engines.protocol import edges_of
from ptf.rl.weights.verification import SyncError
from ptf.train.batch_sharding import deal
from tests.rl.test_controller import raw as raw
from tests.rl.test_controller import train

LINES = ["12", "7", "70", "105"]


@pytest.fixture
def short(raw):
    raw["train"] |= {"steps": 2, "validate_every": 2}
    return raw


def allowed(raw: dict, place: Path, lines=LINES, **more) -> dict:
    (place / "allowed.txt").write_text("\n".join(lines))
    raw["rollout"] |= {"constrained_decoding": {"path": str(place / "allowed.txt"), **more}}
    return raw


def answers(run: Path) -> set[str]:
    return {json.loads(line)["response"] for line in (run / "samples.jsonl").read_text().splitlines()}


@pytest.mark.long
@pytest.mark.parametrize("change", [{}, {"kl_coef": 0.05}, {"entropy_coef": 0.01}, {"num_minibatches": 1}])
def test_only_what_is_allowed_is_said_and_the_trainer_knows(short, tmp_path, change):
    short["algo"] |= change
    run = train(allowed(short, tmp_path))
    rows = read_metrics(run / "metrics.jsonl")
    assert answers(run) == set(LINES)
    assert all(row["logprob_diff_max"] <= 1e-5 for row in rows)
    assert rows[0]["entropy"] < np.log(3)  # among few, and not among all 20 characters


@pytest.mark.long
def test_a_policy_learns_which_of_them(raw, tmp_path):
    raw["train"] |= {"steps": 25, "lr": 3e-3, "validate_every": 25}
    raw["rollout"] |= {"reward": {"use": "tests.rl.plugs:by_length"}}
    rows = read_metrics(train(allowed(raw, tmp_path)) / "metrics.jsonl")
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1
    assert rows[-1]["greedy_reward/dev"] == pytest.approx(
        5 / 6
    )  # greedy: the shortest that is allowed, of one character


def test_repeated_answers(short, tmp_path):
    lines = ["12", "34", "56"]
    run = train(allowed(short, tmp_path, lines, lines_per_response=2))
    assert answers(run) <= {a + b for a in lines for b in lines}
    assert len(answers(run)) > 3


@pytest.mark.parametrize("lines", [["12", "34", "56"], ["1", "23", "24", "255"]])
def test_distinct_answers(short, tmp_path, lines):
    """None is said twice, drawn or greedy, and the trainer's distribution is the engine's."""
    short["rollout"]["max_new_tokens"] = 10
    run = train(allowed(short, tmp_path, lines, lines_per_response=3, distinct=True))
    assert answers(run) <= {"".join(some) for some in itertools.permutations(lines, 3)}
    assert len(answers(run)) > 3
    assert all(row["logprob_diff_max"] <= 1e-5 for row in read_metrics(run / "metrics.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize("with_trie", [False, True])
@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_a_nucleus_is_the_trainers_too(short, tmp_path, top_p, with_trie):
    short["algo"], short["rollout"]["top_p"] = {}, top_p
    rows = read_metrics(train(allowed(short, tmp_path) if with_trie else short) / "metrics.jsonl")
    assert all(row["logprob_diff_max"] <= 1e-5 for row in rows)
    assert {"clip_share", "entropy"} <= rows[0].keys()


def test_a_trainer_that_does_not_know_is_stopped(raw, tmp_path, monkeypatch):
    with_logits_processing = online_job.with_logits_processing

    def unaware(recipe, rollout, trie):
        return recipe, with_logits_processing(recipe, rollout, None)[1]

    monkeypatch.setattr(online_job, "with_logits_processing", unaware)
    said = r"the limit is .*, by rollout\.logprob_tolerance\), .*\. Either the engine computes otherwise"
    with pytest.raises(SyncError, match=said):
        train(allowed(raw, tmp_path))


@pytest.mark.parametrize(
    ("algo", "said"),
    [
        ({"num_minibatches": 2}, "a second optimizer step"),
        ({"update_epochs": 2}, "a second optimizer step"),
        ({"kl_coef": 0.1}, "algo.kl_coef"),
        ({}, None),
    ],
)
def test_a_nucleus_with_what_it_cannot_be_with_is_refused(raw, algo, said):
    raw["algo"], raw["rollout"]["top_p"] = algo, 0.9
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        loads(yaml.safe_dump(raw))


def test_answers_that_are_too_long_or_not_there_are_refused(raw, tmp_path):
    with pytest.raises(UserError, match=r"longest response has 8 tokens.*rollout\.max_new_tokens is 6"):
        train(allowed(raw, tmp_path, ["1234567"]))
    with pytest.raises(UserError, match="no allowed responses"):
        train(allowed(raw, tmp_path, []))


def test_a_run_does_not_go_on_with_other_answers(short, tmp_path):
    raw = short
    train(allowed(raw, tmp_path))
    with pytest.raises(UserError, match=r"rollout\.constrained_decoding"):
        train(allowed(raw, tmp_path, ["9", "12"]))
    train(allowed(raw, tmp_path))  # the control


class Own(GRPO):
    """A recipe whose loss knows only the model's own distribution."""

    reads_processing = False


def test_a_recipe_that_cannot_be_told_what_answers_are_drawn_from_is_refused(short, tmp_path):
    short["algo"] = {}
    short["rollout"]["temperature"] = 0.7
    train({**short, "recipe": {"use": "tests.rl.faulty:Recipe"}})  # the control: it is told
    with pytest.raises(UserError, match="set `reads_processing = True`"):
        train({**short, "recipe": {"use": "tests.rl.test_restricted:Own"}}, "b")


def test_answers_that_would_be_cut_in_evaluation_are_refused_before_training(short, tmp_path):
    short["evaluate"] |= {"max_new_tokens": 3}
    with pytest.raises(UserError, match=r"longest response has 4 tokens.*evaluate\.max_new_tokens is 3"):
        train(allowed(short, tmp_path))


def test_a_nucleus_in_bf16(raw):
    """Engine and trainer end it at other tokens there."""
    raw["algo"], raw["rollout"]["top_p"], raw["train"]["precision"] = {}, 0.8, "bf16"
    raw["train"] |= {"steps": 4, "validate_every": 4}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert max(row["logprob_diff_max"] for row in rows) < 0.1


def test_a_rank_without_rows_of_its_own_has_no_states():
    """Its batch is there so that others have theirs."""
    idle = deal([], World(), 1, 16)[0]
    edges = edges_of(Trie.of([[3, 4]], (1,)))
    x, head = torch.randn(1, 16, 8), Head(torch.randn(20, 8), 20)
    assert not token_logprobs(
        x, head, idle.targets, idle.loss_weights, LogitsProcessing(edges=edges), idle.token_columns.get("trie_states")
    ).logprobs.any()
