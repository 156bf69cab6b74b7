"""From metrics.jsonl to charts."""

import json
from pathlib import Path

import pytest

from flows import cards
from ptf.config import load
from tests.flows.toy import FLOW, wait_for


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
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def drawn(spec: dict) -> dict[str, list[tuple[float, float]]]:
    """The curves of a chart."""
    values = spec["data"]["values"]
    return {name: [(v["step"], v["value"]) for v in values if v["of"] == name] for name in {v["of"]: None for v in values}}


def test_only_whole_lines_and_finite_numbers_are_read(job):
    file = log(job, {"step": 1, "loss": float("nan"), "kl": 2, "phase": "a", "ok": True}, {"loss": 3.0}, {"step": 2, "loss": 1.5})
    with file.open("ab") as half:
        half.write('{"step": 3, "loss": "é'.encode()[:-1])
    assert cards.read(file) == [{"step": 1, "kl": 2}, {"step": 2, "loss": 1.5}]
    assert cards.read(file.with_name("absent")) == []


def test_charts_follow_the_columns():
    rows = [{"step": n, "time": n, "mem_gib": 1, "seconds/rollout": 2, "seconds/update": 3, "reward_std": 1, "reward": 0, "loss": 4} for n in (1, 2)]
    rows[1] = {**rows[1], "loss/dev": 5}
    found = cards.charts(rows)
    assert list(found) == ["loss", "reward", "seconds", "mem_gib"]
    assert drawn(found["loss"]) == {"loss": [(1, 4), (2, 4)], "loss/dev": [(2, 5)]}
    assert drawn(found["seconds"]).keys() == {"seconds/rollout", "seconds/update"}
    assert cards.charts([]) == {}


@pytest.mark.parametrize("count", [1, 499, 500, 501, 999, 12345])
def test_a_chart_stays_small_and_ends_at_the_last_step(count):
    rows = [{"step": n, "reward": n, "reward_std": n} for n in range(count)]
    curves = drawn(cards.charts(rows)["reward"])
    assert sum(map(len, curves.values())) <= cards.POINTS
    for curve in curves.values():
        assert curve[-1] == (count - 1, count - 1)
        assert curve == sorted(curve)


def test_a_page_keeps_its_charts_until_there_is_a_new_column(job):
    page = cards.TrainingPage(card := Page(), job, "run")
    assert [type(part).__name__ for part in card] == ["Markdown", "Table"]
    log(job, {"step": 1, "loss": 3})
    assert page.update()
    chart, parts = page.charts["loss"], list(card)
    assert [type(part).__name__ for part in parts] == ["Markdown", "Table", "Table"]
    assert not page.update()
    log(job, {"step": 1, "loss": 3}, {"step": 2, "loss": 2})
    assert page.update()
    assert card == parts
    assert drawn(chart._spec) == {"loss": [(1, 3), (2, 2)]}
    log(job, {"step": 2, "loss": 2, "kl": 1})
    assert page.update()
    assert page.charts.keys() == {"loss", "kl"}
    assert len(card) == 3
    assert card != parts


def test_a_live_card_grows_while_the_step_runs(job, monkeypatch):
    monkeypatch.setattr(cards, "REFRESH_S", 0.01)
    with cards.live(card := Page(), job, "run"):
        log(job, {"step": 1, "loss": 3})
        wait_for(lambda: card.rendered > 0, seconds=10)


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
    leaves = dict(cards.flatten(job.model_dump(mode="json")))
    assert leaves["train.lr"] == 1e-4
    assert leaves["flow.steps.train.retries"] == 2
    assert leaves["data.validation"] == {}
