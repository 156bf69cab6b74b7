"""Training on events: what training on text promises, by the same tests; and that a model learns what comes next, and
nothing from others' histories."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import ConfigError, loads
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.evaluate.gate import Worse, check_evaluation, comparisons, raise_if_worse
from ptf.evaluate.measurement import measure_run
from ptf.events.catalogue import Catalogue
from ptf.events.prepare import generated
from ptf.publish.export_comparison import model_difference
from ptf.run import run
from ptf.tasks.slates import worth
from tests.tiny import arithmetic, read_jsonl, small_job, write_jsonl
from tests.train import test_loop

SETTINGS: dict[str, Any] = {
    "users": 60,
    "items": 48,
    "kinds": 4,
    "window": 64,
    "model": {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16},
}


def histories(directory: Path, head: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The raw job that trains on made-up histories in `directory`; `head`: with one over the catalogue."""
    made = directory / "made"
    declared = {}
    if head is not None:
        args = {"items": str(made / "items.safetensors"), **head}
        declared = {"head": {"use": "ptf.events.item_head:NextItem", "args": args}}
    generated(str(made), **SETTINGS | settings)
    held_out = {"path": str(made / "held_out.jsonl"), "kind": "prompt"}
    sources, validation = (
        {name: {"path": str(made / f"{file}.jsonl"), "kind": "events"}}
        for name, file in (("h", "train"), ("next", "held_out_loss"))
    )
    raw = small_job(directory, sources, validation, made / "model")
    vectors = {"init": str(made / "tokens.safetensors")}
    raw["model"] |= {**declared, "tokens": {"file": str(made / "tokens.jsonl"), **vectors}}
    raw["train"]["lr"] = 3e-3
    raw["evaluate"] = {"ranking": {"sources": {"next": held_out}, "catalogue": str(made / "catalogue.json")}}
    return raw


FORMS: dict[str, dict[str, Any]] = {
    "items": {},
    "semantic": {"ids": {"levels": [6, 3]}},
    "plain head": {"head": {"set_wise": True, "values": {"days": 0.1, "spend": 0.1}}},
    "head": {"head": {"set_wise": True, "copy": True, "dropout": 0.2, "values": {"days": 0.1, "spend": 0.1}}},
    "sampled": {"head": {"sampled": 20, "copy": True}},
}


@pytest.fixture(params=["items", "semantic", "plain head", "head"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return histories(tmp_path, **FORMS[request.param])


def trained(raw: dict[str, Any], run_name: str) -> tuple[dict[str, float], Path]:
    job = loads(yaml.safe_dump(raw))
    directory = run(job, run_name)
    return measure_run(job, directory), directory


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_bits(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    test_loop.test_a_resumed_run_ends_with_the_same_bits(raw, [5, 10], monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    "form",
    [
        "items",
        "plain head",
        "head",
        *(pytest.param(form, marks=pytest.mark.cluster) for form in ("semantic", "sampled")),
    ],
)
def test_it_learns_what_comes_next_and_nothing_from_the_histories_of_others(tmp_path: Path, form: str) -> None:
    raw = histories(tmp_path, users=150, **FORMS[form])
    raw["train"] |= {"steps": 80, "validate_every": 0, "global_batch_sequences": 8, "micro_batch_sequences": 8}
    raw["checkpoint"] = {"every": 80}
    found, directory = trained(raw, "whole")
    rows = read_jsonl(directory / "ranked" / "next.jsonl")
    assert found["all/ndcg@10/next"] == pytest.approx(np.mean([row["all/ndcg@10"] for row in rows]))
    assert model_difference(loads(yaml.safe_dump(raw)), directory, directory / "model") < 1e-4, "it may be published"
    held = tmp_path / "made" / "held_out.jsonl"
    prompts = read_jsonl(held)
    histories_ = [{key: row[key] for key in ("messages", "history")} for row in prompts]
    random.Random(0).shuffle(histories_)
    write_jsonl(held, [row | other for row, other in zip(prompts, histories_, strict=True)])
    strangers = measure_run(loads(yaml.safe_dump(raw)), directory)
    assert found["all/ndcg@10/next"] > strangers["all/ndcg@10/next"] + 0.2
    assert found["new/ndcg@10/next"] > strangers["new/ndcg@10/next"] + 0.1
    assert found["loss/next"] < read_metrics(directory / "metrics.jsonl")[0]["loss"]


def slates(directory: Path, users: int = 100, steps: int = 40, **settings: Any) -> dict[str, Any]:
    """The raw job of slates of four items, from a model that was trained on made-up histories for so many steps."""
    raw = histories(directory, users=users, **settings)
    raw["train"] |= {"steps": steps, "validate_every": 0, "global_batch_sequences": 8, "micro_batch_sequences": 8}
    raw["checkpoint"] = {"every": 40}
    _, start = trained(raw, "sft")
    made = directory / "made"
    size = 4 * (1 if settings.get("ids", "items") == "items" else 3) + 1
    worth = {"use": "ptf.tasks.slates:revenue", "args": {"catalogue": str(made / "catalogue.json"), "size": 4}}
    return {key: raw[key] for key in ("output", "seed", "compute", "checkpoint")} | {
        "recipe": "grpo",
        "model": {"path": str(start / "model")},
        "algo": {"kl_coef": 0.01},
        "track": {"tensorboard": False, "samples_every": 1, "sample_prompts": 100},
        "data": {"sources": {"p": {"path": str(made / "train_prompts.jsonl"), "kind": "prompt"}}, "seq_len": 96},
        "rollout": {
            "engine": "native",
            "prompts_per_step": 16,
            "group_size": 8,
            "max_new_tokens": size,
            "reward": worth,
            "constrained_decoding": {"path": str(made / "allowed.txt"), "lines_per_response": 4, "distinct": True},
        },
        "train": {
            "steps": 25,
            "lr": 2e-3,
            "global_batch_sequences": 8,
            "micro_batch_sequences": 8,
            "precision": "fp32",
            "schedule": "constant",
        },
        "evaluate": {
            "sources": {"slates": {"path": str(made / "held_out.jsonl"), "kind": "prompt"}},
            "samples_per_prompt": 1,
            "max_new_tokens": size,
            "metrics": {
                "invalid": {"use": "ptf.tasks.slates:invalid", "args": {"catalogue": str(made / "catalogue.json")}}
            },
        },
    }


@pytest.mark.long
def test_slates_are_made_of_items_alone_and_what_they_are_worth_rises(tmp_path: Path) -> None:
    found, directory = trained(slates(tmp_path), "grpo")
    assert found["invalid/slates"] == found["starting_model/invalid/slates"] == 0
    assert found["greedy_reward/slates"] > found["starting_model/greedy_reward/slates"] + 0.02
    assert agreed(directory, tmp_path) == 25 * 16 * 8


def agreed(directory: Path, place: Path) -> int:
    """Return the number of slates of a run. Check that each has four items and that its log-probs are the same in
    the engine and in the trainer."""
    catalogue = Catalogue.load(str(place / "made" / "catalogue.json"))
    said = read_jsonl(directory / "samples.jsonl")
    for one in said:
        items = catalogue.read(one["response"])
        assert len({item.name for item in items if item}) == 4
        assert None not in items
    assert max(row["logprob_diff_max"] for row in read_metrics(directory / "metrics.jsonl")) <= 1e-5
    return len(said)


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.parametrize("ids", ["items", {"levels": [6, 3]}], ids=["items", "semantic"])
def test_vllm_says_items_alone_and_finds_them_as_likely_as_the_trainer(
    tmp_path: Path, ray_cluster: Any, ids: Any
) -> None:
    raw = slates(tmp_path, ids=ids, model={**SETTINGS["model"], "head_dim": 32})  # of 16, vLLM on a CPU has none
    raw["rollout"] |= {"engine": "vllm"}
    raw["train"] |= {"steps": 3}
    raw["compute"] = {"launcher": "ray", "device": "cpu", "workers": 1, "threads": 1}
    assert agreed(run(loads(yaml.safe_dump(raw)), "grpo"), tmp_path) == 3 * 16 * 8


def test_a_catalogue_of_another_tokenizer_and_a_metric_that_there_is_not(tmp_path: Path) -> None:
    raw = histories(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    job = loads(yaml.safe_dump(raw | {"publish": {"metric": "all/ndcg@10/next"}}))
    check_evaluation(job)
    with pytest.raises(ConfigError, match="the evaluation will have no 'all/ndcg@5/next'"):
        check_evaluation(loads(yaml.safe_dump(raw | {"publish": {"metric": "all/ndcg@5/next"}})))
    directory = run(job, "a")
    other = tmp_path / "made" / "catalogue.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"tokenizer": "0" * 64}))
    with pytest.raises(UserError, match="the catalogue was made with a different tokenizer than the model's"):
        measure_run(job, directory)


@pytest.mark.long
def test_a_run_is_measured_beside_rivals_which_guard_its_publication(tmp_path: Path) -> None:
    """A model of two steps is worse than counting; that the rivals are those of the same users, the gate checks."""
    raw = histories(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    raw["evaluate"]["ranking"] |= {"baselines": {"personal_frequency": {}, "tifu_knn": {"neighbours": 5}}}
    guard = "baseline/personal_frequency/all/ndcg@10/next"
    job = loads(yaml.safe_dump(raw | {"publish": {"guards": {guard: 0}}}))
    check_evaluation(job)
    metrics, directory = trained(raw | {"publish": {"guards": {guard: 0}}}, "a")
    assert metrics[guard] > metrics["all/ndcg@10/next"]
    assert not any(name.startswith("starting_model/baseline") for name in metrics)
    with pytest.raises(Worse, match=r"worse than personal_frequency: all/ndcg@10/next 0\.\d+ of personal_frequency"):
        raise_if_worse(job, comparisons(job, directory, metrics))
    raise_if_worse(job, comparisons(job, directory, metrics)[:-1])
    rows = read_jsonl(directory / "ranked/baselines/tifu_knn/next.jsonl")
    assert [row["user"] for row in rows] == [row["user"] for row in read_jsonl(directory / "ranked/next.jsonl")]
    by_value = raw["evaluate"]["ranking"] | {"value_weight": 1e6, "baselines": {"popularity": {}}}
    measure_run(loads(yaml.safe_dump(raw | {"evaluate": {"ranking": by_value}})), directory)
    items = Catalogue.load(str(tmp_path / "made" / "catalogue.json")).items
    dearest = [item.name for item in sorted(items, key=lambda item: -item.value)]
    for place in ("next.jsonl", "baselines/popularity/next.jsonl"):
        for row in read_jsonl(directory / "ranked" / place):
            assert row["all/top"] == [name for name in dearest if name in row["all/top"]], "in the order of values"
    assert read_jsonl(directory / "ranked/next.jsonl")[0]["all/top"] == dearest[:10]


@pytest.mark.long
def test_a_users_future_is_played_out(tmp_path: Path) -> None:
    """Each turn shows what the user did, and not what was recommended; every slate is of items, and its reward is what
    it was worth beside its basket."""
    raw = slates(tmp_path, users=40, steps=2)
    catalogue = str(tmp_path / "made" / "catalogue.json")
    raw["rollout"] |= {
        "reward": None,
        "environment": {"use": "ptf.tasks.slates:Future", "args": {"catalogue": catalogue, "turns": 2, "size": 4}},
    }
    raw["rollout"] |= {"prompts_per_step": 8, "group_size": 4}
    raw["data"]["omitted_context"] = "allow"  # the template shows what users did, and nothing that was recommended
    raw["train"] |= {"steps": 2}
    raw["evaluate"].pop("metrics")
    found, directory = trained(raw, "played")
    prompts = read_jsonl(tmp_path / "made" / "train_prompts.jsonl")
    futures = {row["messages"][0]["content"]: row for row in prompts}
    said = read_jsonl(directory / "samples.jsonl")
    items, turns = Catalogue.load(catalogue), []
    for one in said:
        row = futures[one["row"]["messages"][0]["content"]]
        slates_ = one["response"].split(row["told"][0])
        turns.append(len(slates_))
        assert len(slates_) == min(2, len(row["future"]))
        worths = [
            worth(slate, basket, catalogue=catalogue, size=4)["reward"]
            for slate, basket in zip(slates_, row["future"], strict=False)
        ]
        assert all(len([item for item in items.read(slate.removesuffix("<end>")) if item]) == 4 for slate in slates_)
        assert one["reward"] == pytest.approx(sum(worths), abs=1e-5)
    assert set(turns) == {1, 2}
    assert max(row["logprob_diff_max"] for row in read_metrics(directory / "metrics.jsonl")) <= 1e-5
    assert found["greedy_reward/slates"] > 0


@pytest.mark.cluster
def test_a_model_of_text_learns_items_beside_its_chats(tmp_path: Path) -> None:
    chats = arithmetic(tmp_path)
    base = tmp_path / "model"
    made = tmp_path / "made"
    generated(str(made), users=120, items=48, kinds=4, window=48, base=str(base))
    raw = histories(tmp_path / "own")
    raw["model"] = {"path": str(base), "init": "random", "tokens": {"file": str(made / "tokens.jsonl"), "init": "mean"}}
    raw["data"] |= {
        "seq_len": 128,
        "validation": {},
        "sources": {
            "chats": {**chats["data"]["sources"][next(iter(chats["data"]["sources"]))]},
            "items": {"path": str(made / "train.jsonl"), "sampling_weight": 3.0},
        },
    }
    raw["train"] |= {"steps": 120, "global_batch_sequences": 8, "micro_batch_sequences": 8, "validate_every": 0}
    raw["checkpoint"] = {"every": 120}
    raw["evaluate"]["ranking"] = {
        "sources": {"next": {"path": str(made / "held_out.jsonl"), "kind": "prompt"}},
        "catalogue": str(made / "catalogue.json"),
    }
    found, directory = trained(raw, "both")
    losses = [(row["source_loss/chats"], row["source_loss/items"]) for row in read_metrics(directory / "metrics.jsonl")]
    assert all(after < before - 0.5 for before, after in zip(losses[0], losses[-1], strict=True))
    assert found["all/ndcg@10/next"] > 0.3
    tokenizer = Tokenizer.load(str(directory / "model"))
    assert tokenizer.decode(tokenizer.encode("1+2=<i_3><gap_1><i_47>")) == "1+2=<i_3><gap_1><i_47>"
    assert len(tokenizer.encode("<start><i_3><gap_1>")) == 3
