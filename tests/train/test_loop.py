"""The offline loop: what it promises about resuming, splitting and refusing."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ptf import storage
from ptf.compute.tracking import Tracker, is_clock, read_metrics
from ptf.config import loads
from ptf.config.sections.train import TrainConfig
from ptf.errors import UserError
from ptf.run import resolved, run
from ptf.train.optim import Schedule
from tests.tiny import arithmetic, read_jsonl, write_jsonl


class Stopped(Exception):
    pass


def train(raw: dict, run_name: str = "a", **changes) -> Path:
    for key, value in changes.items():
        section, name = key.split("__")
        raw = {**raw, section: {**raw[section], name: value}}
    return run(loads(yaml.safe_dump(raw)), run_name)


def facts(directory: Path) -> list[dict]:
    """Return the rows of metrics without those that depend on the time."""
    return [{k: v for k, v in row.items() if not is_clock(k)} for row in read_metrics(directory / "metrics.jsonl")]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def raw(tmp_path):
    return arithmetic(tmp_path)


@contextlib.contextmanager
def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Tracker], object]) -> Iterator[None]:
    """Within it, trainings call `act` as soon as they have logged this step."""
    log = Tracker.log

    def logged(self, at, metrics):
        log(self, at, metrics)
        if at == step:
            act(self)

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "log", logged)
        yield


def stopped(monkeypatch: pytest.MonkeyPatch, step: int, training: Callable[[], Any]) -> None:
    """Run a training that ends as soon as it has logged this step."""

    def stop(_: Tracker) -> None:
        raise Stopped

    with at_step(monkeypatch, step, stop), pytest.raises(Stopped):
        training()


def resumed_alike(raw: dict, monkeypatch: pytest.MonkeyPatch, *stops: int) -> tuple[Path, Path]:
    """Return a run, and one that was stopped after each of these steps and went on; both must end alike, to the bit."""
    whole = train(raw, "whole")
    for stop in stops:
        stopped(monkeypatch, stop, lambda: train(raw, "stopped"))
    resumed = train(raw, "stopped")
    assert same(weights(whole), weights(resumed))
    assert facts(whole) == facts(resumed)
    return whole, resumed


@pytest.mark.long
@pytest.mark.parametrize("stops", [[3], [8], [5, 10, 11]])
def test_a_resumed_run_ends_with_the_same_bits(raw, stops, monkeypatch):
    whole, _ = resumed_alike(raw, monkeypatch, *stops)
    assert [row["step"] for row in facts(whole)] == list(range(1, 13))


@pytest.mark.long
def test_what_recipes_draw_from_torch_is_drawn_again(raw, monkeypatch):
    """A resumed run draws the same numbers, whatever torch's generator has drawn before and wherever the run was
    stopped, also before its first checkpoint."""
    noisy = {**raw, "recipe": {"use": "tests.train.recipes:NoisySFT", "args": {}}}
    whole = train(noisy, "whole")
    for seed, stop in enumerate([3, 8], 1):
        torch.manual_seed(seed)
        stopped(monkeypatch, stop, lambda: train(noisy, "stopped"))
    torch.manual_seed(3)
    assert facts(train(noisy, "stopped")) == facts(whole)
    assert facts(train(raw, "plain")) != facts(whole)


def test_another_seed_is_another_run(raw):
    """Negative control of the comparison above."""
    a, b = train(raw, "a"), train({**raw, "seed": 2}, "b")
    assert not same(weights(a), weights(b))
    assert facts(a) != facts(b)


def test_how_sequences_are_split_into_passes_does_not_change_the_loss(raw):
    a, b = train(raw, "a"), train(raw, "b", train__micro_batch_sequences=1)
    for x, y in zip(facts(a), facts(b), strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=2e-6)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-5)


@pytest.mark.long
def test_bf16_trains_near_fp32_over_fp32_weights(raw):
    a, b = train(raw, "a"), train(raw, "b", train__precision="bf16")
    assert facts(a)[-1]["loss"] == pytest.approx(facts(b)[-1]["loss"], rel=0.02)
    assert facts(a)[-1]["loss"] != facts(b)[-1]["loss"]
    assert weights(b)["model.norm.weight"].dtype == torch.float32


@pytest.mark.long
def test_the_decay_begins_where_the_held_out_loss_says_and_a_resume_knows_it(raw, monkeypatch):
    raw["train"] |= {"steps": 40, "schedule": "linear", "lr_decay_steps": 6, "validate_every": 2}
    plain = facts(train(raw, "plain"))
    at = next(row["step"] for row in plain if row["step"] >= 8 and "loss/held_out" in row)
    raw["train"]["lr_decay_at_loss"] = plain[at - 1]["loss/held_out"]
    whole = train(raw, "whole")
    rows = facts(whole)
    assert [r["step"] for r in rows] == list(range(1, at + 7))
    assert rows[:at] == plain[:at]
    assert [r["lr"] for r in rows[at:]] == pytest.approx([1e-3 * (6 - i) / 6 for i in range(6)])
    for stop in (at - 1, at + 3):
        stopped(monkeypatch, stop, lambda: train(raw, "stopped"))
    resumed = train(raw, "stopped")
    assert facts(resumed) == rows
    assert same(weights(whole), weights(resumed))


def test_a_finished_run_that_is_run_again_trains_nothing(raw):
    directory = train(raw, "a")
    before = (directory / "metrics.jsonl").read_text()
    train(raw, "a")
    assert (directory / "metrics.jsonl").read_text() == before


def test_a_frozen_key_may_not_change_and_a_free_one_may(raw):
    train(raw, "a")
    train(raw, "a", train__micro_batch_sequences=4)
    with pytest.raises(UserError, match=r"train\.lr"):
        train(raw, "a", train__lr=2e-3)


def test_a_frozen_key_may_not_change_before_the_first_checkpoint_either(raw, monkeypatch):
    stopped(monkeypatch, 2, lambda: train(raw, "a"))
    with pytest.raises(UserError, match=r"seed: 1 → 2"):
        train({**raw, "seed": 2}, "a")
    assert loads((Path(raw["output"]) / "a" / "job.yaml").read_text()).seed == 1


def test_a_run_keeps_the_version_that_it_started_from(raw, tmp_path):
    """Publishing a newer one in between changes nothing for it."""
    versions = tmp_path / "published"
    shutil.copytree(train(raw, "first") / "model", versions / "v1")
    shutil.copytree(train({**raw, "seed": 2}, "second") / "model", versions / "v2")
    for name in ("v1", "v2"):
        storage.commit(versions / name, {"version": name})
    (versions / "latest.json").write_text('{"version": "v1"}')
    job = loads(yaml.safe_dump({**raw, "model": {"path": str(versions)}}))
    pinned = resolved(job)
    assert pinned.model.path == str(versions / "v1")
    run(pinned, "third")
    (versions / "latest.json").write_text('{"version": "v2"}')
    assert resolved(job).model.path == str(versions / "v2")
    assert resolved(job, "third").model.path == str(versions / "v1")


def test_what_a_run_leaves_is_what_it_says(raw):
    directory = train(raw, "a", track__tensorboard=True)
    assert loads((directory / "job.yaml").read_text()).seed == 1
    assert list((directory / "tensorboard").glob("events.*"))
    rows = read_jsonl(directory / "metrics.jsonl")
    assert {
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "mfu",
        "packing_efficiency",
        "peak_memory_gib",
        "data_wait_s",
    } <= rows[0].keys()
    assert [r["step"] for r in rows if "loss/held_out" in r] == [4, 8, 12]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_epochs_train_every_row_as_often_and_resume(raw, tmp_path, monkeypatch):
    """Two sources that end at different times; the steps are counted, and a checkpoint knows them."""
    rows = read_jsonl(tmp_path / "train.jsonl")[:60]
    write_jsonl(tmp_path / "a.jsonl", rows[:45])
    write_jsonl(
        tmp_path / "b.jsonl",
        [{"prompt": row["messages"][0]["content"], "completion": row["messages"][1]["content"]} for row in rows[45:]],
    )
    sources = {
        "a": {"path": str(tmp_path / "a.jsonl")},
        "b": {"path": str(tmp_path / "b.jsonl"), "sampling_weight": 2.0},
    }
    made = {
        **raw,
        "data": {**raw["data"], "sources": sources, "mix": {"exhausted": "drop"}},
        "train": {**raw["train"], "epochs": 2, "steps": None},
    }
    whole = train(made, "whole")
    found = facts(whole)
    # a character a token, and the end of the turn
    trained = sum(len(row["messages"][1]["content"]) + 1 for row in rows)
    assert sum(row["loss_denominator"] for row in found) == 2 * trained
    assert found[0]["source_share/b"] > found[-1].get("source_share/b", 0.0)  # b has ended by then
    for row in found:
        parts = [row[f"source_share/{name}"] * row.get(f"source_loss/{name}", 0.0) for name in "ab"]
        assert row["loss"] == pytest.approx(sum(parts), rel=1e-6)
    stopped(monkeypatch, 5, lambda: train(made, "stopped"))
    assert same(weights(whole), weights(train(made, "stopped")))
    bounded = {**made, "train": {**made["train"], "epochs": None, "steps": 1000}}
    bounded["data"] = {**made["data"], "sources": {name: {**source, "epochs": 2} for name, source in sources.items()}}
    assert facts(train(bounded, "bounded")) == found  # the data ends before the steps do
    bounded["train"]["steps"] = 3
    assert len(facts(train(bounded, "short"))) == 3


def test_bad_rows_are_set_aside_and_counted(raw, tmp_path):
    good = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*good[:6], '{"messages": [', "[]", *good[6:]]) + "\n")
    made = {**raw, "data": {**raw["data"], "max_bad_rows_share": 0.01}}
    run_directory = train(made, "a")
    last = facts(run_directory)[-1]
    assert last["bad_rows"] >= 2
    # a share of the rows; epochs are only begun
    assert last["unused_rows_share"] == pytest.approx(2 / (len(good) + 2), rel=0.5)
    aside = [
        json.loads(line) for file in (run_directory / "quarantine").iterdir() for line in file.read_text().splitlines()
    ]
    assert {(row["where"].rpartition(":")[2], row["reason"][:8]) for row in aside} == {
        ("7", "not JSON"),
        ("8", "a row mu"),
    }
    made["data"]["max_bad_rows_share"] = 0.001
    (tmp_path / "train.jsonl").write_text("\n".join(["{}", *good[:20], "[]", "{}"] * 3) + "\n")
    with pytest.raises(UserError, match=r"rows are bad, more than data\.max_bad_rows_share \(0\.001\) allows"):
        train(made, "b")


def test_warm_up_and_decay_may_be_shares_of_the_run() -> None:
    config = TrainConfig(steps=40, lr=1.0, schedule="linear", warmup_steps=0.1, lr_decay_steps=0.5)
    same = TrainConfig(steps=40, lr=1.0, schedule="linear", warmup_steps=4, lr_decay_steps=20)
    shares, steps = Schedule.of(config, 40), Schedule.of(same, 40)
    assert shares == steps
    assert [shares(step) for step in (0, 3, 20, 30)] == [0.25, 1.0, 1.0, 0.5]
    assert Schedule.of(config, 2).warmup == 1
    assert Schedule.of(config, 80)(0) == 0.125
