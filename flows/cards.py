"""Training, evaluation and publication as Metaflow cards.

Cards only read the run's files (metrics.jsonl, samples.jsonl, checkpoints, responses/). So training does not depend on
cards, and the card of a run that continues an earlier one shows both.
"""

# Metaflow creates its public names at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaflow.cards import Markdown, ProgressBar, Table, VegaChart, YAMLViewer

from flows.charts import Row, charts, read, timeline
from ptf.artifact import Artifact, evaluated, figure
from ptf.config import Job, shown
from ptf.workspace.credentials import redacted
from ptf.workspace.json_lines import json_lines

# shortest pause between updates; the pause is at least a hundred times as long as the last update took, because a card
# is rendered by a separate process, for which Metaflow waits in a busy loop
REFRESH_S = 10
SAMPLES = 8  # most samples on one page
TAIL_BYTES = 1 << 21  # bytes at the end of samples.jsonl that are read for the last step's responses
TIMELINE_STEPS, TIMELINE_BYTES = 6, 1 << 16  # steps of the timeline; bytes at the end of its file that are read
# metrics of the last step, in the header
KPIS = ("loss", "reward", "kl_reference", "tokens_per_s", "step_tokens_per_s", "mfu")


@contextmanager
def live(card: Any, job: Job, run_name: str) -> Iterator[None]:
    """Update the card of the train step while the block runs, and render it at the end if the block fails."""
    page, done = TrainingPage(card, job, run_name), threading.Event()

    def watch() -> None:
        pause = REFRESH_S
        while not done.wait(pause):
            began = time.perf_counter()
            if page.update():
                card.refresh(force=True)
            pause = max(REFRESH_S, 100 * (time.perf_counter() - began))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except (Exception, SystemExit):
        _finish(done, thread, page)
        _render(card)
        raise
    _finish(done, thread, page)


def _render(card: Any) -> None:
    """Render the card of a step that fails; Metaflow does not render it."""
    for _ in range(2):
        # the first call may only start the rendering; the second waits until it is complete
        card.refresh(force=True)


def _finish(done: threading.Event, thread: threading.Thread, page: "TrainingPage") -> None:
    done.set()
    thread.join()
    page.update()


class TrainingPage:
    """The page of the train step: header, progress, charts in two columns, the last responses, checkpoints, the config.

    If the page cannot be drawn, a line on the console reports it, and training continues.
    """

    def __init__(self, card: Any, job: Job, run_name: str):
        self.card, self.job, self.run = card, job, Path(job.output) / run_name
        self.charts: dict[str, VegaChart] = {}
        self.rows: list[Row] = []
        self.begun, self.resumed = time.time(), None
        self.config = YAMLViewer(shown(job).model_dump(mode="json"), title="config")
        self.update()

    def update(self) -> bool:
        """Draw the page again; return whether there were new rows of metrics."""
        before = self.rows
        try:
            if self.resumed is None:
                self.resumed = max(self._finished(), default=0)
            self.rows = read(self.run / "metrics.jsonl")
            self._draw()
        except Exception as error:
            print(f"card: {type(error).__name__}: {error}", flush=True)
            return False
        return self.rows != before

    def _draw(self) -> None:
        specs = charts(self.rows)
        if specs.keys() == self.charts.keys():
            for title, spec in specs.items():
                self.charts[title].update(spec)
        else:
            self.charts = {title: VegaChart(spec) for title, spec in specs.items()}
        total = self.job.train.steps
        parts: list[Any] = [Markdown(self._header())]
        if total:  # with train.epochs, the number of steps is not in the config
            parts.append(ProgressBar(max=total, label="steps", value=self._step()))
        if self.charts:
            each: list[Any] = list(self.charts.values())
            parts.append(Table([each[i : i + 2] for i in range(0, len(each), 2)]))
        if spans := json_lines(self.run / "timeline.jsonl", TIMELINE_BYTES)[-TIMELINE_STEPS:]:
            parts.append(VegaChart(timeline(spans)))
        if responses := read_last(self.run / "samples.jsonl"):
            rows: list[Any] = [
                [short(last_message(row["row"])), short(row["response"]), worth(row)] for row in responses[:SAMPLES]
            ]
            parts.append(Table(rows, headers=[f"prompt, step {responses[0]['step']}", "response", "reward"]))
        parts.append(Markdown(self._checkpoints()))
        self.card.clear()
        self.card.extend([*parts, self.config])

    def _header(self) -> str:
        job = self.job
        recipe = job.recipe if isinstance(job.recipe, str) else job.recipe.use
        lines = [
            f"# {plain(self.run.name)}",
            plain(f"{recipe} · {job.model.path} · {', '.join(job.data.sources)}"),
            self._left(),
        ]
        if self.resumed:
            lines.append(f"continued from the checkpoint of step {self.resumed}")
        if self.rows:
            now = self.rows[-1]
            lines.append(" · ".join(f"{name} {now[name]:.4g}" for name in KPIS if name in now))
        return "\n\n".join(lines)

    def _step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def _left(self) -> str:
        """Return the current step, and the time left at the rate of this attempt, as text."""
        total, step = self.job.train.steps, self._step()
        text, mine = (
            f"step {step} of {total}" if total else f"step {step}",
            [row for row in self.rows if row.get("time", 0) >= self.begun],
        )
        if total and step < total and len(mine) > 1:
            rate = (mine[-1]["time"] - mine[0]["time"]) / (mine[-1]["step"] - mine[0]["step"])
            text += f" · about {duration(rate * (total - step))} left"
        return text

    def _checkpoints(self) -> str:
        if "://" in (self.job.checkpoint.to or ""):
            return plain(f"Checkpoints are below {self.job.checkpoint.to}.")
        steps = self._finished()
        return f"Checkpoints: {', '.join(f'step {step}' for step in steps[-20:])}" if steps else "No checkpoint yet."

    def _finished(self) -> list[int]:
        """Return the steps of the complete checkpoints (those with a manifest); object stores are not searched."""
        root = Path(self.job.checkpoint.to) / self.run.name if self.job.checkpoint.to else self.run / "checkpoints"
        return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in root.glob("step_*/manifest.json"))


def duration(seconds: float) -> str:
    """Return a duration as text, in seconds, minutes or hours."""
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def side_by_side(run: Path, sources: Iterable[str]) -> list[Table]:
    """Return one table per source with the greedy responses to held-out prompts, of the model that training started
    from and of the trained model."""
    parts, place = [], run / "responses"
    for name in sources:
        then = {json.dumps(row["row"], sort_keys=True): row for row in json_lines(place / "start" / f"{name}.jsonl")}
        rows = []
        for row in json_lines(place / f"{name}.jsonl")[:SAMPLES]:
            before = then.get(json.dumps(row["row"], sort_keys=True))
            rewards = f"{worth(before)} → {worth(row)}" if before else worth(row)
            rows.append(
                [
                    short(last_message(row["row"])),
                    short(before["response"]) if before else "",
                    short(row["response"]),
                    rewards,
                ]
            )
        if rows:
            parts.append(Table(rows, headers=[f"{name}: prompt", "starting model", "trained model", "reward"]))
    return parts


def last_message(row: Mapping[str, Any]) -> str:
    """Return the last message of a prompt."""
    messages = row.get("messages")
    return str(messages[-1].get("content")) if messages else str(row.get("prompt", row.get("text", "")))


def worth(row: Mapping[str, Any]) -> str:
    """Return the reward of a response as text."""
    return f"no result: {short(row['no_result'])}" if row["reward"] is None else f"{row['reward']:.3g}"


def short(text: Any, most: int = 300) -> str:
    """Return a text for a table's cell, which needs no escaping; of a long text only the end."""
    words = str(text)
    return words if len(words) <= most else "… " + words[-most:]


def plain(text: str) -> str:
    """Return a text for Markdown, with spaces for the characters that make links and tags.

    The page does not sanitise Markdown, and has no escape for these characters.
    """
    return "".join(" " if c in "<>[]!\\`" else c for c in text)


def read_last(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of the last step in a file of responses; only the end of the file is read."""
    rows = json_lines(path, TAIL_BYTES)
    return [row for row in rows if row.get("step") == rows[-1].get("step")]


def metrics_page(card: Any, artifact: Artifact, job: Job, failed: str = "") -> None:
    """Fill the card of the evaluate step: every metric at the start and now, and the responses side by side.

    For a trial of a sweep that failed, it shows the error, `failed`.
    """
    metrics = artifact.metrics
    card.append(Markdown(f"# {plain(artifact.run_name)}"))
    if failed:
        card.append(Table([[failed]], headers=["failed"]))
        return
    card.append(
        Table(
            [[name, *map(figure, values)] for name, values in evaluated(metrics).items()],
            headers=["metric", "starting model", "trained model"],
        )
    )
    try:
        card.extend(side_by_side(Path(str(artifact.run)), job.evaluate.sources))
    except Exception as error:  # the responses on the card are optional
        print(f"card: {type(error).__name__}: {error}", flush=True)
    card.append(
        Table(
            [[name, figure(metrics[name])] for name in sorted(metrics) if name.startswith("train/")],
            headers=["of the last step", ""],
        )
    )


@contextmanager
def publishing(card: Any, artifact: Callable[[], Artifact], describe: Callable[[Artifact], str]) -> Iterator[None]:
    """Fill the card of the publish step after the block: with the text that `describe` returns for the artifact, or, if
    the block fails, with the error."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # the error that led to the exit
        why = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
        card.extend(
            [
                Markdown(f"# {plain(artifact().run_name)}"),
                Table([[short(redacted(str(why)), 3000)]], headers=["The step failed"]),
            ]
        )
        _render(card)
        raise
    try:
        text = describe(artifact())
    except Exception as error:  # the card is optional
        text = plain(f"card: {type(error).__name__}: {error}")
    card.append(Markdown(text))
