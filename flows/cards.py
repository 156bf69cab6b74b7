"""Training, evaluation and publication as pages. The one idea: the run's own files are the only source (metrics.jsonl, samples.jsonl, checkpoints, answers),
and they are read from outside, so training knows nothing of cards and a run that continues an earlier one shows both."""

# metaflow makes its public names at run time:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import html
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaflow.cards import Markdown, ProgressBar, Table, VegaChart

from flows.charts import Row, charts, read
from ptf.compute.tracking import read_metrics
from ptf.config.schema import Job

if TYPE_CHECKING:
    from steps.artifact import Artifact

REFRESH_S = 10  # at least, and a hundred times what the last one took: rendering is a process of its own, for which Metaflow waits in a busy loop
SAMPLES = 8  # on one page
TAIL_BYTES = 1 << 21  # of samples.jsonl, in which the last step's are
KPIS = ("loss", "reward", "kl", "tok_s", "mfu")  # what the header says of the last step


@contextmanager
def live(card: Any, job: Job, lineage: str) -> Iterator[None]:
    """Keep the card of the train step up to date until the block ends, and after it if the block fails."""
    page, done = TrainingPage(card, job, lineage), threading.Event()

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
    """Of a step that fails, whose cards metaflow does not render."""
    for _ in range(2):
        card.refresh(force=True)  # the first may only start a rendering; the second waits for it, which then has all it needs


def _finish(done: threading.Event, thread: threading.Thread, page: "TrainingPage") -> None:
    done.set()
    thread.join()
    page.update()


class TrainingPage:
    """Header, progress, two charts a row, what was said last, checkpoints, the config. Its parts are replaced only when a new column turns up."""

    def __init__(self, card: Any, job: Job, lineage: str):
        self.card, self.job, self.run = card, job, Path(job.output) / lineage
        self.header, self.samples, self.checkpoints = Markdown(""), Markdown(""), Markdown("")
        self.progress = ProgressBar(max=job.train.steps, label="steps") if job.train.steps else None  # of passes over the data nobody knows how many are left
        self.charts: dict[str, VegaChart] = {}
        self.rows: list[Row] = []
        self.config = Table([[key, str(value)] for key, value in flatten(job.model_dump(mode="json"))], headers=["config", lineage])
        self.resumed = max(finished(self.run), default=0)
        self.begun = time.time()
        self.update()
        self._laid_out()

    def update(self) -> bool:
        """Whether there was anything new."""
        before, self.rows = self.rows, read(self.run / "metrics.jsonl")
        specs = charts(self.rows)
        self.header.update(self._header())
        if self.progress:
            self.progress.update(self._step())
        self.samples.update(answers_table(read_last(self.run / "samples.jsonl")))
        steps = finished(self.run)
        self.checkpoints.update(f"Checkpoints: {', '.join(f'step {step}' for step in steps[-20:])}" if steps else "No checkpoint yet.")
        if specs.keys() == self.charts.keys():
            for title, spec in specs.items():
                self.charts[title].update(spec)
        else:
            self.charts = {title: VegaChart(spec) for title, spec in specs.items()}
            self._laid_out()
        return self.rows != before

    def _laid_out(self) -> None:
        charts = [Table(pairs(list(self.charts.values())))] if self.charts else []
        self.card.clear()
        self.card.extend([self.header, *([self.progress] if self.progress else []), *charts, self.samples, self.checkpoints, self.config])

    def _header(self) -> str:
        job = self.job
        recipe = job.recipe if isinstance(job.recipe, str) else job.recipe.use
        lines = [f"# {self.run.name}", f"{recipe} · `{job.model.path}` · {', '.join(job.data.sources)}"]
        lines.append(self._left())
        if self.resumed:
            lines.append(f"went on from the checkpoint of step {self.resumed}")
        if self.rows:
            now = self.rows[-1]
            lines.append(" · ".join(f"{name} {now[name]:.4g}" for name in KPIS if name in now))
        return "\n\n".join(lines)

    def _step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def _left(self) -> str:
        """How far it is, and how long it will take at the rate of this attempt."""
        total, step = self.job.train.steps, self._step()
        said = f"step {step} of {total or 'all'}"
        if total and self.resumed < step < total:
            said += f" · about {duration((time.time() - self.begun) / (step - self.resumed) * (total - step))} left"
        return said


def finished(run: Path) -> list[int]:
    """Steps of the run's checkpoints that are whole."""
    return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in run.glob("checkpoints/step_*/manifest.json"))


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def answers_table(rows: list[Mapping[str, Any]]) -> str:
    """What was said, and what it was worth, as Markdown."""
    if not rows:
        return ""
    lines = [f"What it said at step {rows[0]['step']}", "", "| prompt | answer | reward |", "|---|---|---|"]
    return "\n".join(lines + [f"| {cell(asked(row['prompt']))} | {cell(row['answer'])} | {worth(row)} |" for row in rows[:SAMPLES]])


def side_by_side(run: Path) -> str:
    """The greedy answers to held-out prompts, of the model that training started from and of what it made."""
    parts = []
    for file in sorted(run.glob("answers/*.jsonl")):
        if not file.name.startswith("start_"):
            then = {cell(asked(row["prompt"])): row for row in read_metrics(file.with_name(f"start_{file.name}"))}
            lines = [f"## {file.stem}", "", "| prompt | at the start | now | reward |", "|---|---|---|---|"]
            for row in read_metrics(file)[:SAMPLES]:
                words = cell(asked(row["prompt"]))
                before = then.get(words)
                rewards = f"{worth(before)} → {worth(row)}" if before else worth(row)
                lines.append(f"| {words} | {cell(before['answer']) if before else ''} | {cell(row['answer'])} | {rewards} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def asked(row: Mapping[str, Any]) -> str:
    """The last thing that a prompt says."""
    messages = row.get("messages")
    return str(messages[-1].get("content")) if messages else str(row.get("prompt", row.get("text", "")))


def worth(row: Mapping[str, Any]) -> str:
    found = row.get("outcome", row.get("reward", row.get("no_result")))
    return f"{found:.3g}" if isinstance(found, int | float) else f"no result: {cell(found)}"


def cell(text: Any, most: int = 300) -> str:
    """As it can stand in a table of Markdown."""
    words = " ".join(str(text).split())
    words = words if len(words) <= most else words[:most] + " …"
    return html.escape(words, quote=False).replace("|", "&#124;").replace("`", "&#96;").replace("*", "&#42;").replace("_", "&#95;")


def read_last(path: Path) -> list[Mapping[str, Any]]:
    """The rows of the last step in a file of answers, of which no more than the end is read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(skipped)
        lines = file.read().split(b"\n")[:-1]  # what follows the last line's end is still being written
    rows = [json.loads(line) for line in (lines[1:] if skipped else lines)]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def metrics_page(card: Any, artifact: "Artifact") -> None:
    """The card of the evaluate step: every metric at the start and now, and answers side by side."""
    found = artifact.metrics
    names = sorted(name for name in found if not name.startswith(("start/", "train/")))
    shown = lambda name: f"{found[name]:.4g}" if name in found else ""  # noqa: E731
    table = Table([[name, shown(f"start/{name}"), shown(name)] for name in names], headers=["metric", "at the start", "now"])
    train = Table([[name, shown(name)] for name in sorted(found) if name.startswith("train/")], headers=["of the last step", ""])
    card.extend([Markdown(f"# {artifact.lineage}"), table, Markdown(side_by_side(Path(str(artifact.run)))), train])


@contextmanager
def publishing(card: Any, artifact: "Callable[[], Artifact]") -> Iterator[None]:
    """The card of the publish step: the model card of what was published and the gates that it has passed, or why it was not."""
    try:
        yield
    except (Exception, SystemExit) as error:
        why = error.__context__ or error  # the exit code of a step comes of an error that says why
        card.append(Markdown(f"# {artifact().lineage}\n\n**Not published.**\n\n{cell(why, 3000)}"))
        _render(card)
        raise
    where = artifact().published
    if where is None:
        card.append(Markdown(f"# {artifact().lineage}\n\n**Not published:** what is there is better."))
        return
    from ptf import storage

    said = storage.read_text(f"{where}/README.md").split("---\n", 2)[-1]
    difference = storage.manifest_of(where)["logprob_difference"]
    passed = f"Gates passed: transformers gives the trained model's log-probs to {difference:.1e}; the tokenizer gives the ids that were trained on."
    card.append(Markdown(f"{passed}\n\n{said}"))


def pairs(items: list[Any]) -> list[list[Any]]:
    return [items[i : i + 2] for i in range(0, len(items), 2)]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
