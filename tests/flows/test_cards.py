"""From metrics.jsonl to charts."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from flows import cards, charts
from ptf.artifact import Artifact
from ptf.config import load, loads
from ptf.errors import UserError
from ptf.run import run as train
from tests.flows.toy import FLOW
from tests.tiny import arithmetic, online, write_jsonl
from tests.waiting import until


class Page(list):
    """What a card is to us: a list of components that can be rendered."""

    rendered = 0

    def refresh(self, force: bool) -> None:
        self.rendered += 1


@pytest.fixture
def job(tmp_path):
    return load(FLOW.with_name("toy.yaml"), overrides=[f"output={tmp_path}"])


def log(job, *rows: dict) -> Path:
    file = Path(job.output) / "run" / "metrics.jsonl"
    file.parent.mkdir(exist_ok=True)
    write_jsonl(file, rows)
    return file


def drawn(spec: dict) -> dict[str, list[tuple[float, float]]]:
    """The curves of a chart."""
    values = spec["data"]["values"]
    return {
        name: [(v["step"], v["value"]) for v in values if v["of"] == name] for name in {v["of"]: None for v in values}
    }


def test_only_whole_lines_and_finite_numbers_are_read(job):
    file = log(
        job,
        {"step": 1, "loss": float("nan"), "kl": 2, "phase": "a", "ok": True},
        {"loss": 3.0},
        {"step": 2, "loss": 1.5},
    )
    with file.open("ab") as half:
        half.write('{"step": 3, "loss": "é'.encode()[:-1])
    assert charts.read(file) == [{"step": 1, "kl": 2}, {"step": 2, "loss": 1.5}]
    assert charts.read(file.with_name("absent")) == []


def test_charts_follow_the_columns():
    rows = [
        {
            "step": n,
            "time": n,
            "peak_memory_gib": 1,
            "seconds/rollout": 2,
            "seconds/update": 3,
            "reward_std": 1,
            "reward": 0,
            "loss": 4,
        }
        for n in (1, 2)
    ]
    rows[1] = {**rows[1], "loss/dev": 5}
    found = charts.charts(rows)
    assert list(found) == ["loss", "reward", "seconds", "peak_memory_gib"]
    assert drawn(found["loss"]) == {"loss": [(1, 4), (2, 4)], "loss/dev": [(2, 5)]}
    assert drawn(found["seconds"]).keys() == {"seconds/rollout", "seconds/update"}
    assert charts.charts([]) == {}


def test_a_timeline_places_the_phases_of_steps_one_after_the_other():
    phases = [["rollout", "rollout", 0.0, 2.0], ["policy", "update", 2.0, 3.0], ["rollout", "update_slices", 2.0, 3.5]]
    spec = charts.timeline([{"step": n, "seconds": 4.0, "phases": phases} for n in (7, 8)])
    bars, steps = (layer["data"]["values"] for layer in spec["layer"])
    assert [(bar["role"], bar["phase"], bar["from"], bar["to"]) for bar in bars[3:]] == [
        ("rollout", "rollout", 4.0, 6.0),
        ("policy", "update", 6.0, 7.0),
        ("rollout", "update_slices", 6.0, 7.5),
    ]
    assert steps == [{"at": 0.0, "step": 7}, {"at": 4.0, "step": 8}]


def test_charts_and_header_name_metrics_that_runs_report(tmp_path):
    offline = arithmetic(tmp_path)
    offline["train"] |= {"steps": 1, "validate_every": 0}
    grpo = online(offline, tmp_path, prompts_per_step=2, group_size=2, max_new_tokens=2)
    made = train(loads(json.dumps(offline)), "sft")
    jobs = {
        "grpo": grpo | {"algo": {"kl_coef": 0.01, "num_minibatches": 2}},
        "opd": grpo | {"recipe": "opd", "algo": {"teacher": str(made / "model")}},
    }
    runs = [made, *(train(loads(json.dumps(raw)), name) for name, raw in jobs.items())]
    rows = [row for run in runs for row in charts.read(run / "metrics.jsonl")]
    reported = {name for row in rows for name in row}
    speeds = {name for name in cards.KPIS if name.endswith("tokens_per_s")}
    assert all(any(speeds & row.keys() for row in charts.read(run / "metrics.jsonl")) for run in runs)
    assert {*cards.KPIS, *charts.SHARES, *charts.NEVER} <= reported
    assert set(charts.FIRST) <= charts.charts(rows).keys()
    assert not {"kl", "length"} & reported


@pytest.mark.parametrize("count", [1, 499, 500, 501, 999, 12345])
def test_a_chart_stays_small_and_ends_at_the_last_step(count):
    rows = [{"step": n, "reward": n, "reward_std": n} for n in range(count)]
    curves = drawn(charts.charts(rows)["reward"])
    assert sum(map(len, curves.values())) <= charts.POINTS
    for curve in curves.values():
        assert curve[-1] == (count - 1, count - 1)
        assert curve == sorted(curve)


def test_a_page_keeps_its_charts_until_there_is_a_new_column(job):
    page = cards.TrainingPage(card := Page(), job, "run")
    assert [type(part).__name__ for part in card] == ["Markdown", "ProgressBar", "Markdown", "YAMLViewer"]
    log(job, {"step": 1, "loss": 3})
    assert page.update()
    chart, parts = page.charts["loss"], list(card)
    assert [type(part).__name__ for part in parts] == ["Markdown", "ProgressBar", "Table", "Markdown", "YAMLViewer"]
    assert not page.update()
    log(job, {"step": 1, "loss": 3}, {"step": 2, "loss": 2})
    assert page.update()
    assert card[2] is not None
    assert page.charts["loss"] is chart
    assert drawn(chart._spec) == {"loss": [(1, 3), (2, 2)]}
    log(job, {"step": 2, "loss": 2, "kl": 1})
    assert page.update()
    assert page.charts.keys() == {"loss", "kl"}
    assert len(card) == len(parts)
    assert card != parts


def test_a_page_says_where_it_went_on_from_how_far_it_is_and_what_was_said(job):
    file = log(job, {"step": 1, "loss": 3, "time": 1})
    for step in (1, 2):
        (file.parent / f"checkpoints/step_{step:08}").mkdir(parents=True)
    (file.parent / "checkpoints/step_00000001/manifest.json").write_text("{}")
    said = [
        {
            "step": n,
            "row": {"messages": [{"role": "user", "content": "1|1"}]},
            "response": f"<b>{n}_[x](y)",
            "reward": n / 4,
        }
        for n in (1, 2)
    ]
    (file.parent / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said) + '{"step": 3, "pro')
    page = cards.TrainingPage(card := Page(), job, "run")
    assert "left" not in card[0].render()["source"], "no step of this attempt is known yet"
    log(job, *({"step": n, "loss": n, "time": page.begun + 100 * n} for n in (1, 2)))
    assert page.update()
    header, progress, _, samples, checkpoints, _ = (part.render() for part in card)
    assert "sft · some/model · chat" in header["source"]
    assert "step 2 of 3 · about 2 min left" in header["source"]
    assert "continued from the checkpoint of step 1" in header["source"]
    assert (progress["value"], progress["max"]) == (2, 3)
    assert samples["data"] == [["1|1", "<b>2_[x](y)", "0.5"]], "as it was said: a cell of a table is text"
    assert checkpoints["source"].strip() == "Checkpoints: step 1"


def test_a_file_that_cannot_be_read_does_not_end_training(job, capsys):
    (log(job, {"step": 1, "loss": 3}).with_name("samples.jsonl")).mkdir()
    with cards.live(Page(), job, "run"):
        pass
    assert "card: IsADirectoryError" in capsys.readouterr().out


def test_of_a_long_file_of_samples_the_end_is_read(job, monkeypatch):
    file = log(job).with_name("samples.jsonl")
    write_jsonl(file, [{"step": n // 3, "row": {}, "response": "x" * 50, "reward": 1.0} for n in range(90)])
    monkeypatch.setattr(cards, "TAIL_BYTES", 400)
    assert [row["step"] for row in cards.read_last(file)] == [29] * 3


def test_responses_stand_beside_those_of_the_start_to_the_same_prompt(tmp_path):
    prompts = [{"messages": [{"role": "user", "content": "x" * 400 + end}]} for end in "ab"]
    for name, answers in (("start/test", "34"), ("test", "21"), ("gone", "00")):
        (tmp_path / "responses" / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"row": prompt, "response": answer, "reward": float(answer == "2"), "no_result": None}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        write_jsonl(tmp_path / "responses" / f"{name}.jsonl", rows[:: -1 if "/" in name else 1])
    (table,) = cards.side_by_side(tmp_path, ["test", "absent"])
    assert [row[1:] for row in table.render()["data"]] == [["3", "2", "0 → 1"], ["4", "1", "0 → 0"]]


def test_why_nothing_was_published_is_on_the_page(job):
    def refuse() -> None:
        try:
            raise UserError("not published: greedy_pass_rate/test is 0.1, the published version has 0.5")
        except UserError:
            sys.exit(1)

    card = Page()
    with pytest.raises(SystemExit), cards.publishing(card, lambda: Artifact("run"), lambda _: ""):
        refuse()
    assert "greedy_pass_rate/test is 0.1" in card[1].render()["data"][0][0]
    assert card.rendered


def test_a_live_card_grows_while_the_step_runs(job, monkeypatch):
    monkeypatch.setattr(cards, "REFRESH_S", 0.01)
    with cards.live(card := Page(), job, "run"):
        log(job, {"step": 1, "loss": 3})
        until(lambda: card.rendered > 0, seconds=10)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_the_card_of_a_failed_step_shows_how_far_it_came(job, error):
    def fail(card: Page) -> None:
        with cards.live(card, job, "run"):
            log(job, {"step": 1, "loss": 3})
            raise error

    with pytest.raises(error):
        fail(card := Page())
    assert card.rendered
    assert "step 1 of 3" in card[0].render()["source"]


def test_the_config_is_on_the_page(job):
    cards.TrainingPage(card := Page(), job, "run")
    shown = yaml.safe_load(card[-1].render()["yaml_string"])
    assert float(shown["train"]["lr"]) == 1e-4
    assert shown["flow"]["stages"]["train"]["retries"] == 2
    assert shown["data"]["validation"] == {}


def test_a_damaged_line_is_an_error_and_never_the_end_of_the_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in charts.read(file)] == [1, 2], "the last one is still being written"
    for bad in ('{"st', "", "[]"):
        file.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a row"):
            charts.read(file)
