"""Training as a page: charts of `metrics.jsonl` that grow while the step runs. The one idea: the file is the only source, and it is read from
outside, so training knows nothing of cards and a run that continues an earlier one shows both."""

# metaflow makes its public names at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaflow.cards import Markdown, Table, VegaChart

from ptf.config.schema import Job

REFRESH_S = 30  # rendering is a process of its own, about 1 s of one core, and Metaflow waits for it in a busy loop
POINTS = 500  # in one chart; the page carries its data
SHARES = {"reward_std": "reward", "kl_old": "kl", "kl_reference": "kl", "logprob_diff_mean": "logprob_diff"}  # column → chart; else up to its slash
FIRST = ("loss", "reward", "kl", "entropy", "clip_share", "logprob_diff", "length", "grad_norm", "lr", "tok_s", "mfu", "seconds")
NEVER = ("step", "time")  # the axis, and a clock

Row = Mapping[str, float]


@contextmanager
def live(card: Any, job: Job, lineage: str) -> Iterator[None]:
    """Keep the card of the train step up to date until the block ends, and after it if the block fails."""
    page, done = TrainingPage(card, job, lineage), threading.Event()

    def watch() -> None:
        while not done.wait(REFRESH_S):
            if page.update():
                card.refresh(force=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except (Exception, SystemExit):
        _finish(done, thread, page)
        for _ in range(2):  # metaflow renders the cards of steps that succeed, not of this one
            card.refresh(force=True)  # the first may only start a rendering; the second waits for it, which then has all it needs
        raise
    _finish(done, thread, page)


def _finish(done: threading.Event, thread: threading.Thread, page: "TrainingPage") -> None:
    done.set()
    thread.join()
    page.update()


class TrainingPage:
    """Header, two charts a row, the config. Charts are replaced as a whole only when a new column turns up."""

    def __init__(self, card: Any, job: Job, lineage: str):
        self.card, self.job, self.lineage = card, job, lineage
        self.header = Markdown("")
        self.charts: dict[str, VegaChart] = {}
        self.rows: list[Row] = []
        self.config = Table([[key, str(value)] for key, value in flatten(job.model_dump(mode="json"))], headers=["config", lineage])
        self.card.extend([self.header, self.config])
        self.update()

    def update(self) -> bool:
        """Whether there was anything new."""
        before, self.rows = self.rows, read(Path(self.job.output) / self.lineage / "metrics.jsonl")
        specs = charts(self.rows)
        step = int(self.rows[-1]["step"]) if self.rows else 0
        self.header.update(f"# {self.lineage}\n{self.job.model.path} · step {step} of {self.job.train.steps or 'all'}")
        if specs.keys() == self.charts.keys():
            for title, spec in specs.items():
                self.charts[title].update(spec)
        else:
            self.charts = {title: VegaChart(spec) for title, spec in specs.items()}
            self.card.clear()
            self.card.extend([self.header, Table(pairs(list(self.charts.values()))), self.config])
        return self.rows != before


def metrics_page(card: Any, lineage: str, metrics: Mapping[str, float]) -> None:
    """The card of the evaluate step."""
    card.extend([Markdown(f"# {lineage}"), Table([[name, f"{value:.4g}"] for name, value in sorted(metrics.items())], headers=["metric", "value"])])


def read(path: Path) -> list[Row]:
    """The finite numbers of each line; a line that is still being written is left for the next look."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append({key: value for key, value in row.items() if type(value) in (int, float) and math.isfinite(value)})
    return [row for row in rows if "step" in row]


def charts(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Title → Vega-Lite spec, in the order of FIRST, then of appearance."""
    groups: dict[str, list[str]] = {}
    for column in dict.fromkeys(key for row in rows for key in row if key not in NEVER):
        groups.setdefault(SHARES.get(column, column.partition("/")[0]), []).append(column)
    order = sorted(groups, key=lambda title: FIRST.index(title) if title in FIRST else len(FIRST))
    return {title: spec(title, groups[title], rows) for title in order}


def spec(title: str, columns: list[str], rows: list[Row]) -> dict[str, Any]:
    each = POINTS // len(columns)
    curves = {key: thin([row for row in rows if key in row], each) for key in columns}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": title,
        "data": {"values": [{"step": row["step"], "value": row[key], "of": key} for key, curve in curves.items() for row in curve]},
        "mark": {"type": "line", "point": len(rows) < 50, "tooltip": True},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}},
            "color": {"field": "of", "type": "nominal", "title": None, "legend": {"orient": "bottom"} if len(columns) > 1 else None},
        },
        "width": 340,
        "height": 200,
    }


def thin(rows: list[Row], most: int) -> list[Row]:
    """At most that many rows, evenly spaced, the last one always among them."""
    return rows[:: -max(1, math.ceil(len(rows) / most))][::-1]


def pairs(items: list[Any]) -> list[list[Any]]:
    return [items[i : i + 2] for i in range(0, len(items), 2)]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
