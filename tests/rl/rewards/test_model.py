"""A reward model in the loop: it scores what transformers would, adds to what there is,
and the policy learns to please it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.compute.world import World
from ptf.config import loads
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.cluster import LocalCluster, Pool, RoleSpec
from ptf.rl.rewards.model import RewardModel, RewardModelClient
from ptf.rl.roles import ModelSettings
from ptf.run import run
from tests.rl.test_controller import raw as raw  # a fixture
from tests.rl.test_controller import train
from tests.tiny import arithmetic, write_jsonl


@pytest.fixture(scope="module")
def liked(tmp_path_factory) -> str:
    """A reward model that prefers short answers, and the model that it was made from beside it."""
    place = tmp_path_factory.mktemp("rm")
    job = arithmetic(place)
    rng = np.random.default_rng(0)
    numbers = [
        ("".join(map(str, rng.integers(0, 10, 1))), "".join(map(str, rng.integers(0, 10, 4)))) for _ in range(200)
    ]
    pairs = [{"prompt": f"{i % 30}+1=", "chosen": short, "rejected": long} for i, (short, long) in enumerate(numbers)]
    job["data"] = {
        **job["data"],
        "sources": {"pairs": {"path": str(write_jsonl(place / "pairs.jsonl", pairs))}},
        "validation": {},
    }
    job["train"] = {**job["train"], "steps": 40, "lr": 2e-3, "validate_every": 0}
    job["checkpoint"] = {"every": 40}
    return str(run(loads(yaml.safe_dump({**job, "recipe": "rm"})), "rm") / "model")


@pytest.fixture
def taste(liked) -> RewardModelClient:
    config = TrainConfig(steps=1, lr=1e-3, precision="fp32", micro_batch_sequences=2)
    settings = ModelSettings(directory=Path(liked), section=ModelConfig(path=liked), train=config, seed=0, seq_len=64)
    spec = RoleSpec("reward_model", RewardModel, settings)
    group = LocalCluster(World(), [Pool("all", frozenset({"reward_model"}), (1,))]).start(spec)
    return RewardModelClient(group, Tokenizer.load(liked), 64, 0.5)


def said(text: str, outcome=None, question: str = "1+2=") -> Trajectory:
    none = np.zeros(0, np.int32)
    prompt = Prompt(none, {"messages": [{"role": "user", "content": question}]}, "p", 0)
    return Trajectory(prompt, (Generation(none, none, none.astype(np.float32), none, True),), text, outcome)


def test_scores_are_transformers_and_are_added_to_what_there_is(taste, liked):
    from transformers import AutoModelForSequenceClassification

    texts = ["3", "12345", "9", "0000", "77"]
    groups = [
        tuple(said(text, Reward(float(i))) for i, text in enumerate(texts)),
        (said("3"), said("9", NoResult("it crashed"))),
    ]
    first, second = taste.score(groups)
    model = AutoModelForSequenceClassification.from_pretrained(liked, dtype=torch.float32)
    for i, (t, text) in enumerate(zip(first, texts, strict=True)):
        messages = [*t.prompt.row["messages"], {"role": "assistant", "content": text}]
        with torch.no_grad():
            want = float(model(torch.tensor([taste.tokenizer.render(messages, False)])).logits[0, 0])
        assert isinstance(t.outcome, Reward)
        assert t.outcome.value == pytest.approx(i + 0.5 * want, abs=1e-5)
    assert second[0].outcome.value == pytest.approx(first[0].outcome.value, abs=1e-6)
    assert second[1].outcome == NoResult("it crashed"), "never a reward"


def test_what_it_cannot_read_has_no_result(taste):
    long, empty = said("1" * 60), replace(said("1"), prompt=Prompt(np.zeros(0, np.int32), {"prompt": 7}, "p", 0))
    ((far, wrong, fine),) = taste.score([(long, empty, said("1"))])
    assert "reads 64 tokens at most, this response with its prompt has" in far.outcome.reason
    assert "the reward model cannot read it: a prompt must be a string or a list" in wrong.outcome.reason
    assert isinstance(fine.outcome, Reward)


def test_an_empty_response_has_a_score(taste):
    """It is no answer to imitate, but one that a policy gives, and a worse one than others."""
    ((empty,),) = taste.score([(said(""),)])
    assert isinstance(empty.outcome, Reward)


@pytest.mark.cluster
def test_a_policy_learns_what_it_likes(raw, liked):
    """Which need not be what it was made to like: from random weights the policy finds answers that it has never seen,
    and scores high."""
    raw["rollout"] = {
        **{k: v for k, v in raw["rollout"].items() if k != "reward"},
        "reward_model": {"path": liked},
        "max_no_result_share": 0.8,
    }
    raw["train"] = {**raw["train"], "steps": 25, "lr": 3e-3, "validate_every": 0, "schedule": "constant"}
    made = train({**raw, "evaluate": {}})
    rows = read_metrics(made / "metrics.jsonl")
    assert np.mean([row["reward"] for row in rows[-5:]]) > rows[0]["reward"] + 0.5
    assert {"seconds/reward_model", "peak_memory_gib/reward_model"} <= rows[0].keys()


def test_held_out_answers_need_a_reward_that_was_not_trained_on(raw, liked):
    raw["rollout"] = {**{k: v for k, v in raw["rollout"].items() if k != "reward"}, "reward_model": {"path": liked}}
    with pytest.raises(UserError, match=r"evaluate\.sources  needs evaluate\.reward"):
        loads(yaml.safe_dump(raw))


def test_a_model_without_a_score_is_refused(raw):
    with pytest.raises(UserError, match=r"is no reward model: its config\.json names no …ForSequenceClassification"):
        train({**raw, "rollout": {**raw["rollout"], "reward_model": {"path": raw["model"]["path"]}}})


def test_its_pool_may_be_its_own(raw, liked):
    with_model = {
        **raw,
        "rollout": {**raw["rollout"], "reward_model": {"path": liked, "weight": 0.1}, "max_no_result_share": 0.8},
        "train": {**raw["train"], "steps": 1},
    }
    pools = {"a": {"roles": ["policy", "rollout"]}, "b": {"roles": ["reward_model"], "offload": "disk"}}
    rows = [
        read_metrics(train({**with_model, "compute": {**raw["compute"], "pools": p}}, name) / "metrics.jsonl")
        for name, p in (("x", {}), ("y", pools))
    ]
    assert rows[0][0]["reward"] == rows[1][0]["reward"]
    assert json.dumps(rows[0][0]["grad_norm"]) == json.dumps(rows[1][0]["grad_norm"])
