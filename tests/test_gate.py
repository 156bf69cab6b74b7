"""What is worse than what training started from, on the same held-out rows, is not published;
what the rows cannot tell is."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from ptf import storage
from ptf.artifact import Artifact
from ptf.config import ConfigError, loads
from ptf.errors import UserError
from ptf.evaluate import gate
from ptf.evaluate.gate import Comparison, Worse, interval, quantile
from ptf.storage import published_versions
from steps.stages import evaluate, page, prepare, publish, tokenize, train
from tests.rl.test_controller import raw as rl_raw  # noqa: F401  a fixture
from tests.tiny import arithmetic, read_jsonl, write_jsonl


@pytest.mark.parametrize(("freedom", "error"), [(4, 4e-4), (6, 5e-5), (10, 4e-6), (30, 1e-7), (511, 1e-9)])
def test_the_quantile_is_students(freedom: int, error: float) -> None:
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=error)


def test_the_interval_of_equal_denominators_is_students() -> None:
    differences = np.random.default_rng(0).normal(0.1, 1.0, 40)
    wanted = stats.t.interval(0.95, 39, differences.mean(), stats.sem(differences))
    assert interval(differences, np.ones(40)) == pytest.approx(wanted, rel=1e-3)


def test_the_interval_covers_a_ratio_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(1), 0
    for _ in range(600):
        sizes = rng.integers(1, 20, 60).astype(float)
        low, high = interval(sizes * 0.3 + rng.normal(0, 1, 60) * np.sqrt(sizes), sizes)
        inside += low <= 0.3 <= high
    assert 0.92 <= inside / 600 <= 0.98


def test_few_rows_tell_nothing_and_equal_ones_all() -> None:
    assert interval(np.full(4, -1.0), np.ones(4)) == (-math.inf, math.inf)
    low, high = interval(np.full(10, -1.0), np.ones(10))
    assert (low, high) == pytest.approx((-1, -1))
    assert Comparison("a", 10, 1, 0, low, high, allowed=0).is_worse
    assert not Comparison("a", 10, 1, 0, low, high, allowed=1.5).is_worse
    assert interval(np.zeros(10), np.ones(10)) == (0, 0)
    assert not Comparison("a", 10, 0, 0, 0, 0, allowed=0).is_worse


def outcome(value: float | str) -> dict[str, Any]:
    """A reward, or the reason why there is none."""
    return {"reward": None, "no_result": value} if isinstance(value, str) else {"reward": value, "no_result": None}


def answers(run: Path, then: list[Any], now: list[Any], source: str = "test") -> dict[str, float]:
    """What the evaluate stage leaves of rewards; its metrics."""
    for prefix, values in (("start/", then), ("", now)):
        rows = [{"row": {"n": n}, "response": "", **outcome(value)} for n, value in enumerate(values)]
        write_jsonl(run / gate.RESPONSES / f"{prefix}{source}.jsonl", rows)
    gate.commit_rows(run)

    def mean(values):
        return float(np.mean([v for v in values if not isinstance(v, str)]))

    both = {"starting_model/": then, "": now}
    return {
        f"{p}{rate}/{source}": mean(
            v if rate == "greedy_reward" else [x if isinstance(x, str) else float(x >= 1) for x in v]
        )
        for p, v in both.items()
        for rate in ("greedy_reward", "greedy_pass_rate")
    }


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    raw = arithmetic(tmp_path)
    raw["evaluate"] = {
        "sources": {"test": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}},
        "reward": {"use": "ptf.tasks.tiny:always"},
    }
    return raw


@pytest.mark.parametrize(
    ("then", "now", "worse"),
    [
        ([1] * 41 + [0] * 471, [1] * 9 + [0] * 503, True),  # .080 → .018 of 512
        ([1] * 9 + [0] * 503, [1] * 41 + [0] * 471, False),
        ([1] * 4 + [0] * 46, [1] * 3 + [0] * 47, False),  # of so few it may be chance
        ([1, 0] * 50, [0, 1] * 50, False),  # other rows, as many
        ([1, 1, 1, 1], [0, 0, 0, 0], False),  # too few
        (["timed out"] * 20 + [1] * 20, [1] * 20 + ["timed out"] * 20, False),  # no row has both
    ],
)
def test_what_is_worse_beyond_its_interval_is_named(
    raw: dict[str, Any], tmp_path: Path, then: list, now: list, worse: bool
) -> None:
    job, metrics = loads(yaml.safe_dump(raw)), answers(tmp_path, then, now)
    compared = gate.comparisons(job, tmp_path, metrics)
    assert [one.metric for one in compared] == ["greedy_reward/test", "greedy_pass_rate/test"]
    assert [one.is_worse for one in compared] == [worse, worse]
    off = loads(yaml.safe_dump(raw | {"publish": {"gate": "off"}}))
    if worse:
        with pytest.raises(
            Worse,
            match=r"greedy_pass_rate/test 0\.08008 of the starting model, 0\.01758 of the trained one; "
            r"improvement -0\.0\d+ to -0\.0\d+ "
            r".*512 held-out items\): worse.*publish\.gate: off",
        ):
            gate.raise_if_worse(job, compared)
    else:
        gate.raise_if_worse(job, compared)
    gate.raise_if_worse(off, gate.comparisons(off, tmp_path, metrics))
    assert gate.describe(off, compared) == "not compared with what training started from: publish.gate is off"


def test_the_metric_that_is_named_counts_and_no_other(raw: dict[str, Any], tmp_path: Path) -> None:
    metrics = answers(tmp_path, [0.9] * 50, [0.1] * 49 + [1])
    job = loads(yaml.safe_dump(raw | {"publish": {"metric": "greedy_pass_rate/test"}}))
    gate.raise_if_worse(job, compared := gate.comparisons(job, tmp_path, metrics))
    assert [one.metric for one in compared] == ["greedy_pass_rate/test"]
    job = loads(yaml.safe_dump(raw | {"publish": {"metric": "greedy_reward/test"}}))
    with pytest.raises(Worse, match="greedy_reward/test"):
        gate.raise_if_worse(job, gate.comparisons(job, tmp_path, metrics))
    job = loads(yaml.safe_dump(raw | {"publish": {"metric": "greedy_reward/test", "max_regression": 0.9}}))
    gate.raise_if_worse(job, gate.comparisons(job, tmp_path, metrics))
    job = loads(yaml.safe_dump(raw | {"publish": {"metric": "pass@8/test"}}))  # which is not a mean over rows
    with pytest.raises(
        Worse, match=r"pass@8/test 0\.5 of the starting model, 0\.4 of the trained one; not a mean over rows"
    ):
        gate.raise_if_worse(
            job, gate.comparisons(job, tmp_path, metrics | {"starting_model/pass@8/test": 0.5, "pass@8/test": 0.4})
        )


def test_rows_of_another_evaluation_are_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    job, metrics = loads(yaml.safe_dump(raw)), answers(tmp_path, [1] * 10, [1] * 10)
    file = tmp_path / "responses" / "test.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for changed in (lines[1:], lines[::-1]):
        file.write_text("".join(changed))
        gate.commit_rows(tmp_path)
        with pytest.raises(UserError, match="not measured on the same held-out rows; run the evaluate stage again"):
            gate.comparisons(job, tmp_path, metrics)


def test_users_are_compared_by_their_rankings(tmp_path: Path) -> None:
    raw: dict[str, Any] = arithmetic(tmp_path) | {"evaluate": {"ranking": {"sources": {"next": {"path": "x"}}}}}
    raw["model"]["init"] = "pretrained"
    job = loads(yaml.safe_dump(raw))
    for prefix, value in (("start/", 0.8), ("", 0.2)):
        write_jsonl(
            tmp_path / "ranked" / f"{prefix}next.jsonl",
            [{"user": n, "all/ndcg@10": value + n / 100} for n in range(10)],
        )
    gate.commit_rows(tmp_path)
    metrics = {"starting_model/all/ndcg@10/next": 0.845, "all/ndcg@10/next": 0.245}
    with pytest.raises(Worse, match=r"all/ndcg@10/next 0\.845 of the starting model"):
        gate.raise_if_worse(job, gate.comparisons(job, tmp_path, metrics))
    assert not gate.needs_losses(job)


def guarded(tmp_path: Path, **publish: Any) -> dict[str, Any]:
    """A job that ranks a catalogue beside TIFU-kNN, with these keys of `publish`."""
    ranking = {"sources": {"next": {"path": "x"}}, "baselines": {"tifu_knn": {}}}
    raw: dict[str, Any] = arithmetic(tmp_path) | {"evaluate": {"ranking": ranking}, "publish": publish}
    raw["model"]["init"] = "pretrained"
    return raw


def rankings(run: Path, start: float, baseline: float, now: float) -> dict[str, float]:
    """What the evaluate stage leaves of rankings with these mean NDCGs, of new items too; its metrics."""
    noise = np.random.default_rng(0).normal(0, 0.05, 40)
    metrics = {}
    for place, prefix, value in (
        ("start", "starting_model/", start),
        ("baselines/tifu_knn", "baseline/tifu_knn/", baseline),
        ("", "", now),
    ):
        rows = [{"user": n, "all/ndcg@10": value + x, "new/ndcg@10": value / 2 + x} for n, x in enumerate(noise)]
        write_jsonl(run / "ranked" / place / "next.jsonl", rows)
        metrics |= {f"{prefix}all/ndcg@10/next": value, f"{prefix}new/ndcg@10/next": value / 2}
        metrics[f"{prefix}all/coverage@10/next"] = value
    gate.commit_rows(run)
    return metrics


@pytest.mark.parametrize(
    ("guard", "allowed", "worse"),
    [
        ("new/ndcg@10/next", 0.0, False),  # better than the start
        ("all/coverage@10/next", 0.0, False),
        ("baseline/tifu_knn/all/ndcg@10/next", 0.0, True),
        ("baseline/tifu_knn/all/ndcg@10/next", 0.05, False),  # by 0.03 alone
        ("baseline/tifu_knn/all/coverage@10/next", 0.0, True),  # no mean over users: by its difference
    ],
)
def test_a_guard_refuses_what_is_worse_on_another_metric_or_than_a_baseline(
    tmp_path: Path, guard: str, allowed: float, worse: bool
) -> None:
    metrics = rankings(tmp_path, start=0.2, baseline=0.28, now=0.25)
    job = loads(yaml.safe_dump(guarded(tmp_path, guards={guard: allowed})))
    gate.check_evaluation(job)
    compared = gate.comparisons(job, tmp_path, metrics)
    assert [one.metric for one in compared] == ["all/ndcg@10/next", guard.removeprefix("baseline/tifu_knn/")]
    if worse:
        with pytest.raises(
            Worse, match=r"not published: worse than tifu_knn: all/\w+@10/next 0\.28 of tifu_knn, 0\.25 of"
        ):
            gate.raise_if_worse(job, compared)
    else:
        gate.raise_if_worse(job, compared)
    assert compared[1].describe() in gate.describe(job, compared)
    off = loads(yaml.safe_dump(guarded(tmp_path, guards={guard: allowed}, gate="off")))
    gate.raise_if_worse(off, gate.comparisons(off, tmp_path, metrics))


def test_a_guard_of_the_start_refuses_what_became_worse_within_its_limit(tmp_path: Path) -> None:
    metrics = rankings(tmp_path, start=0.3, baseline=0.1, now=0.28)  # new: 0.15 → 0.14
    named = {"metric": "all/ndcg@10/next", "max_regression": 0.1}
    for allowed, worse in ((0.02, False), (0.003, True)):
        job = loads(yaml.safe_dump(guarded(tmp_path, **named, guards={"new/ndcg@10/next": allowed})))
        compared = gate.comparisons(job, tmp_path, metrics)
        assert [one.is_worse for one in compared] == [False, worse]
        if worse:
            with pytest.raises(Worse, match=r"started from: new/.*allowed regression: 0\.003 \(publish\.guards\)\. "):
                gate.raise_if_worse(job, compared)
        else:
            assert compared[1].describe().endswith("worse, within publish.guards")


def test_a_baseline_guards_a_run_whose_start_is_not_measured(tmp_path: Path) -> None:
    metrics = rankings(tmp_path, start=0.9, baseline=0.28, now=0.25)
    guard = "baseline/tifu_knn/new/ndcg@10/next"
    job = loads(yaml.safe_dump(guarded(tmp_path, gate="unmeasured", guards={guard: 0})))
    gate.check_evaluation(job)
    with pytest.raises(Worse, match="worse than tifu_knn: new/ndcg@10/next"):
        gate.raise_if_worse(job, gate.comparisons(job, tmp_path, metrics))
    without = loads(yaml.safe_dump(guarded(tmp_path, gate="unmeasured")))
    assert gate.comparisons(without, tmp_path, metrics) == [], "the start is worse than nothing"
    del metrics[guard]
    assert guard in gate.unmeasured(job, metrics)
    with pytest.raises(UserError, match=f"publish.guards: the evaluation has not measured {guard}"):
        gate.comparisons(job, tmp_path, metrics)


def test_other_users_than_the_baselines_are_refused(tmp_path: Path) -> None:
    metrics = rankings(tmp_path, start=0.2, baseline=0.28, now=0.25)
    file = tmp_path / "ranked/baselines/tifu_knn/next.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    gate.commit_rows(tmp_path)
    job = loads(yaml.safe_dump(guarded(tmp_path, guards={"baseline/tifu_knn/all/ndcg@10/next": 0})))
    with pytest.raises(UserError, match="not measured on the same held-out rows"):
        gate.comparisons(job, tmp_path, metrics)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guards": {"all/ndcg@5/next": 0}}, r"publish\.guards: the evaluation will have no 'all/ndcg@5/next'"),
        ({"guards": {"baseline/ease/all/ndcg@10/next": 0}}, "will have no 'baseline/ease/all/ndcg@10/next'"),
        ({"metric": "baseline/tifu_knn/all/ndcg@10/next"}, r"publish\.metric: the evaluation will have no 'baseline"),
        ({"guards": {"all/ndcg@10/next": 0}, "gate": "unmeasured"}, r"publish\.gate: unmeasured does not measure it"),
        ({"guards": {"all/ndcg@10/next": 0}, "random": True}, r"random weights are not ranked \(model\.init\); remove"),
        ({"baselines": {"tifu": {}}}, "tifu is not a baseline; there are"),
        ({"baselines": {"ease": {}}, "value_weight": 0.5}, "ease may have scores below 0.*set value_weight: 0"),
    ],
)
def test_guards_and_baselines_that_cannot_be_measured_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    raw = guarded(tmp_path, **{key: changes[key] for key in ("guards", "metric", "gate") if key in changes})
    raw["evaluate"]["ranking"] |= {key: changes[key] for key in ("baselines", "value_weight") if key in changes}
    raw["model"] |= {"init": "random"} if "random" in changes else {}
    with pytest.raises(ConfigError, match=message):
        gate.check_evaluation(loads(yaml.safe_dump(raw)))
    gate.check_evaluation(loads(yaml.safe_dump(guarded(tmp_path))))


def staged(raw: dict[str, Any], run_name: str = "a") -> tuple[Any, Artifact]:
    job, artifact = loads(yaml.safe_dump(raw)), Artifact(run_name)
    for stage in (prepare, tokenize, train, evaluate):
        artifact = stage(job, artifact)
    return job, artifact


def wrong(tmp_path: Path) -> dict[str, Any]:
    """A job that goes on from a model that has learned its sums, with data that teach others."""
    raw: dict[str, Any] = arithmetic(tmp_path) | {"output": str(tmp_path / "first")}
    raw["train"] |= {"steps": 30, "validate_every": 0}
    _, first = staged(raw)
    rows = read_jsonl(tmp_path / "train.jsonl")
    for row in rows:
        row["messages"][-1]["content"] = "-+=-"
    write_jsonl(tmp_path / "train.jsonl", rows)
    return raw | {"model": {"path": str(first.model)}, "output": str(tmp_path / "runs")}


@pytest.mark.long
def test_a_training_that_made_it_worse_is_not_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = wrong(tmp_path)
    job, artifact = staged(raw)
    assert "gate: loss/held_out " in capsys.readouterr().out
    (one,) = gate.comparisons(job, Path(str(artifact.run)), artifact.metrics)
    assert one.rows == 20, "documents, where there are few packed sequences"
    assert one.now == artifact.metrics["loss/held_out"]
    middle = (one.low + one.high) / 2
    assert middle == pytest.approx(one.start - one.now, rel=1e-4), "the rows are those of the metric"
    with pytest.raises(Worse, match=r"not published: worse than what training started from: loss/held_out"):
        publish(job, artifact)
    assert published_versions.pointer(job.versions) is None
    assert not storage.exists(f"{job.versions}/a/manifest.json")

    job = loads(yaml.safe_dump(raw | {"publish": {"gate": "off"}}))
    artifact = publish(job, artifact)
    words = "not compared with what training started from: publish.gate is off"
    assert words in capsys.readouterr().out
    assert words in page(artifact)
    assert f"Gate: {words}." in (Path(str(artifact.published)) / "README.md").read_text()


def test_a_training_that_made_it_better_is_and_says_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 30}
    job, artifact = staged(raw)
    artifact = publish(job, artifact)
    words = r"held-out items): better"
    assert words in capsys.readouterr().out
    assert words in page(artifact)
    assert words in (Path(str(artifact.published)) / "README.md").read_text()
    assert words in storage.manifest_of(str(artifact.published))["gate"]


def test_where_nothing_is_held_out_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = arithmetic(tmp_path)
    del raw["data"]["validation"]
    raw["train"] |= {"steps": 1, "validate_every": 0}
    job, artifact = staged(raw)
    publish(job, artifact)
    words = "gate: not compared with what training started from: nothing held out was measured"
    assert words in capsys.readouterr().out


def test_a_policy_that_unlearned_its_task_is_not_published(rl_raw: dict[str, Any]) -> None:  # noqa: F811
    """GRPO on one reward, judged by its contrary; no metric is named."""
    rl_raw["train"] |= {"steps": 8, "lr": 5e-3, "validate_every": 0}
    rl_raw["evaluate"] |= {
        "reward": {"use": "tests.rl.plugs:by_wordiness"},
        "samples_per_prompt": 1,
        "limit": 60,
        "max_new_tokens": 6,
    }
    job, artifact = staged(rl_raw)
    assert artifact.metrics["greedy_reward/dev"] < artifact.metrics["starting_model/greedy_reward/dev"]
    with pytest.raises(Worse, match=r"worse than what training started from: greedy_reward/dev"):
        publish(job, artifact)
    assert published_versions.pointer(job.versions) is None


def test_the_refusal_names_the_limit(tmp_path: Path) -> None:
    job = loads(yaml.safe_dump(arithmetic(tmp_path)))
    for allowed, limit in (
        (0.1, r"; allowed regression: 0\.1 \(publish\.max_regression\)\. publish\.gate: off"),
        (0.0, r"so it has no interval\. publish\.gate: off"),
    ):
        with pytest.raises(Worse, match=limit):
            gate.raise_if_worse(job, [Comparison("pass@8/dev", 0, 0.5, 0.3, -0.2, -0.2, allowed)])
    gate.raise_if_worse(job, [Comparison("pass@8/dev", 0, 0.5, 0.3, -0.2, -0.2, 0.3)])


def test_max_regression_is_in_the_unit_of_the_named_metric_alone(raw: dict[str, Any], tmp_path: Path) -> None:
    """Default metrics, which stand in for one that was not measured on the starting model, may not be worse."""
    metrics = answers(tmp_path, [1] * 41 + [0] * 471, [1] * 9 + [0] * 503)
    named = {"metric": "kl/dev", "max_regression": 0.5}
    job = loads(yaml.safe_dump(raw | {"publish": named}))
    compared = gate.comparisons(job, tmp_path, metrics | {"kl/dev": 1.0})
    assert [one.metric for one in compared] == ["greedy_reward/test", "greedy_pass_rate/test"]
    with pytest.raises(Worse, match=r"held-out items\): worse\. publish\.gate: off"):
        gate.raise_if_worse(job, compared)


def test_the_verdict_says_what_is_within_the_allowed_regression(raw: dict[str, Any], tmp_path: Path) -> None:
    metrics = answers(tmp_path, [1] * 41 + [0] * 471, [1] * 9 + [0] * 503)
    for allowed, verdict in ((0.5, "worse, within publish.max_regression"), (0.0, "worse")):
        publish_section = {"metric": "greedy_pass_rate/test", "max_regression": allowed}
        job = loads(yaml.safe_dump(raw | {"publish": publish_section}))
        assert gate.describe(job, gate.comparisons(job, tmp_path, metrics)).endswith(f"held-out items): {verdict}")


@pytest.mark.parametrize(
    ("metric", "allowed", "improvement", "worse"),
    [("auc/a", 0.0, 0.25, False), ("ce/a", 0.0, -0.25, True), ("ce/a", 0.3, -0.25, False)],
)
def test_a_metric_of_all_rows_together_is_compared_without_an_interval(tmp_path, metric, allowed, improvement, worse):
    section = {"metric": metric, "max_regression": allowed}
    job = loads(yaml.safe_dump(arithmetic(tmp_path) | {"publish": section}))
    (one,) = gate.comparisons(job, tmp_path, {f"starting_model/{metric}": 0.5, metric: 0.75})
    assert (one.low, one.high, one.is_worse) == (improvement, improvement, worse)
