"""A sweep's trials are checked before the first runs, and the best by the metric is the one that is published."""

import errno
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows import base, sweep_flow
from ptf.artifact import Artifact
from ptf.config import dump, load, loads
from ptf.errors import UserError
from ptf.storage import published_versions
from steps.sweep import best, trials
from tests.flows.toy import ROOT, Toy
from tests.tiny import arithmetic

METRIC = {"metric": "loss/held_out"}


@pytest.fixture
def raw(tmp_path) -> dict[str, Any]:
    raw = arithmetic(tmp_path)
    raw["train"] = {**raw["train"], "steps": 3, "validate_every": 0}
    return raw | {
        "publish": METRIC,
        "flow": {"sweep": [{"train.lr": 1e-9}, {"train.lr": 3e-3, "train.global_batch_sequences": 8}]},
    }


def job(raw: dict[str, Any]):
    return loads(yaml.safe_dump(raw))


def test_trials_are_the_job_with_other_values(raw):
    one, two = map(loads, trials(job(raw)))
    found = [(job.train.lr, job.train.global_batch_sequences) for job in (one, two)]
    assert found == [(1e-9, 4), (3e-3, 8)]
    same = job(raw)
    assert dump(two) == dump(
        same.model_copy(update={"train": same.train.model_copy(update={"lr": 3e-3, "global_batch_sequences": 8})})
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flow": {}}, r"flow\.sweep: a sweep needs at least two trials"),
        ({"publish": {}}, r"publish\.metric: a sweep chooses the best trial by a metric"),
        ({"flow": {"sweep": [{"train.lr": 1e-3}, {"train.lrr": 1e-3}]}}, r"flow\.sweep\[1\]: .*train.lrr.*unknown key"),
        ({"flow": {"sweep": [{"train.lr": "fast"}, {"train.lr": 1e-3}]}}, r"flow\.sweep\[0\]: .*train\.lr"),
        (
            {"flow": {"sweep": [{"output": "a"}, {"output": "b"}]}},
            r"flow\.sweep\[0\]: output must be the same in all trials",
        ),
        (
            {"flow": {"sweep": [{"train.lr": 1.0}, {"data": {"validation": {"held_out": {"limit": 3}}}}]}},
            r"flow\.sweep\[1\]: data\.validation must be the same",
        ),
        (
            {"flow": {"sweep": [{"train.lr": 1.0}, {"data.seq_len": 32}]}},
            r"flow\.sweep\[1\]: data\.seq_len must be the same",
        ),
        (
            {"publish": {"metric": "train/loss"}},
            r"publish\.metric: a sweep chooses the best trial by a metric of the evaluate stage",
        ),
        (
            {"flow": {"sweep": [{"train.lr": 1.0}, {"data.validation.held_out.limit": 3}]}},
            r"flow\.sweep\[1\]: data\.validation must be the same",
        ),
    ],
)
def test_what_is_no_sweep_is_refused(raw, change, message):
    with pytest.raises(UserError, match=message):
        trials(job(raw | change))


@pytest.mark.parametrize(
    ("metric", "values", "chosen"),
    [
        ("kl/dev", [0.5, 0.25, 0.75], 1),
        ("accuracy/dev", [0.5, 0.25, 0.75], 2),
        ("accuracy/dev", [math.nan, 0.25, None], 1),
        ("kl/dev", [0.5, 0.5, 0.5], 0),
    ],
)
def test_the_best_is_chosen_and_all_are_shown(raw, metric, values, chosen, capsys):
    sweep = {"sweep": [{"train.lr": 1.0 + i} for i in range(3)]}
    one = job(raw | {"publish": {"metric": metric}, "flow": sweep})
    found = [{} if value is None else {str(one.publish.metric): value} for value in values]
    assert best(one, found) == chosen
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines] == ["→" if i == chosen else " " for i in range(3)]


def test_where_no_trial_has_the_metric_what_there_is_is_named(raw):
    with pytest.raises(UserError, match=r"no trial's evaluation has 'loss/held_out'; there are accuracy/dev"):
        best(job(raw), [{"accuracy/dev": 0.5}, {}])


@pytest.mark.parametrize("name", ["sweep", "retrain"])
def test_the_tiny_configs_name_a_metric_that_the_evaluate_stage_has(name):
    one = load(str(ROOT / f"configs/tiny/{name}.yaml"))
    assert str(one.publish.metric) in {f"greedy_pass_rate/{source}" for source in one.evaluate.sources}
    assert len(trials(one)) == 2 if name == "sweep" else not one.flow.sweep


@pytest.mark.cluster
def test_the_flow_publishes_the_better_trial(raw, tmp_path):
    (tmp_path / "flow").mkdir()
    toy = Toy(tmp_path / "flow")
    raw["flow"] = {"sweep": [{"train.lr": 1e30}, *raw["flow"]["sweep"]]}
    (toy.directory / "job.yaml").write_text(yaml.safe_dump(raw))
    done = toy("run", "--config", "job.yaml", flow=ROOT / "flows" / "sweep_flow.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = published_versions.pointer(f"{raw['output']}/published")
    assert found is not None
    assert found.version.startswith("sweep-")
    assert found.version.endswith("-2"), "a learning rate of 1e30 diverges, and one of 1e-9 learns nothing"
    assert "trial 0: " in done.stdout + done.stderr
    assert published_versions.versions(f"{raw['output']}/published") == [found.version]


def test_a_trial_runs_in_the_environment_of_its_stage_and_fails_alone(raw, monkeypatch, capsys):
    raw["flow"]["stages"] = {"train": {"env_vars": {"HF_TOKEN": "env:PLANTED"}}}
    monkeypatch.setenv("PLANTED", "a1b2c3d4e5f6g7h8i9j0")
    monkeypatch.setenv("HF_TOKEN", "")  # put back at the end
    for module in (base, sweep_flow):
        monkeypatch.setattr(module, "current", SimpleNamespace(step_name="train", retry_count=0))
    flow: Any = object.__new__(sweep_flow.SweepFlow)  # Metaflow's constructor reads the command line
    flow.number, flow.trial, flow.failed, flow.artifact = 0, trials(job(raw))[0], "", Artifact(run_name="a-0")

    def failing(error):
        raise error

    with pytest.raises(SystemExit):  # what is no fault of the trial's values ends the run
        flow._stage(lambda *_: failing(OSError(errno.ENOSPC, "No space left on device")))
    assert "disk" in capsys.readouterr().err
    assert flow.failed == ""
    flow._stage(lambda *_: failing(UserError(f"diverged with {os.environ['HF_TOKEN']}")))
    assert flow.failed == "diverged with ***"
    assert capsys.readouterr().err == "trial 0: diverged with ***\n"
    flow._stage(lambda *_: failing(AssertionError("a failed trial does nothing more")))
