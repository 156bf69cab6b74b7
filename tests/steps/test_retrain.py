"""Retraining: what was not seen before is trained on, from what is published, and only what is better is published."""

import os
import shutil
from pathlib import Path

import pytest
import yaml

from ptf.artifact import Artifact
from ptf.config import ConfigError, loads
from ptf.data.sources.rows import SourceSpec, stamps
from ptf.errors import UserError
from ptf.storage import published_versions
from steps import retrain
from steps.stages import evaluate, prepare, publish, tokenize, train
from tests.flows.toy import ROOT, Toy
from tests.tiny import arithmetic, read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def raw(tmp_path) -> dict:
    raw = arithmetic(tmp_path, rows=400)
    raw["data"]["sources"]["sums"]["path"] = str(tmp_path / "data")
    raw["train"] = {**raw["train"], "steps": 25, "validate_every": 0, "schedule": "constant"}
    sums(tmp_path, 0, 150)
    return raw | {"publish": {"metric": "loss/held_out"}}


def sums(directory: Path, first: int, last: int, wrong: bool = False) -> None:
    """A file more of sums, or of sums with one another's answers."""
    rows = read_jsonl(directory / "train.jsonl")[first:last]
    answers = [row["messages"][-1]["content"] for row in rows]
    for row, answer in zip(rows, answers[::-1] if wrong else answers, strict=True):
        row["messages"][-1]["content"] = f"{answer}{'+=-' * wrong}"
    write_jsonl(directory / "data" / f"{first}{wrong}.jsonl", rows)


def again(raw: dict, run_name: str) -> Artifact | None:
    """As the flow does it; None where nothing was new."""
    job, artifact = loads(yaml.safe_dump(raw)), Artifact(run_name)
    artifact = retrain.prepare(job, artifact)
    if not retrain.has_new_data(job, artifact):
        return None
    for stage in (tokenize, train, evaluate, retrain.publish):
        artifact = stage(retrain.starting_from_published(job, artifact), artifact)
    return artifact


@pytest.mark.long
def test_new_data_are_trained_on_and_only_what_is_better_is_published(raw, tmp_path, capsys):
    root = f"{raw['output']}/published"
    first = again(raw, "first")
    assert first.published == f"{root}/first"
    assert again(raw, "same") is None
    assert "nothing new since first" in capsys.readouterr().out

    sums(tmp_path, 150, 300)
    better = again(raw, "better")
    assert "sums changed since first" in capsys.readouterr().out
    assert better.published == f"{root}/better"
    assert better.metrics["starting_model/loss/held_out"] == pytest.approx(first.metrics["loss/held_out"], abs=1e-5), (
        "it began with what was published"
    )
    assert better.metrics["loss/held_out"] < first.metrics["loss/held_out"]

    sums(tmp_path, 300, 400, wrong=True)
    worse = again(
        raw | {"data": {**raw["data"], "sources": {"sums": {"path": str(tmp_path / "data/300*.jsonl")}}}}, "worse"
    )
    assert worse.metrics["loss/held_out"] > worse.metrics["starting_model/loss/held_out"]
    assert worse.published is None
    assert published_versions.pointer(root) == published_versions.Pointer("better", ("first",))
    assert "retrain: not published: worse than what training started from: loss/held_out" in capsys.readouterr().out


def test_publishing_again_writes_nothing_and_moves_no_pointer(raw, tmp_path, capsys):
    """As a retry does, or the resume of a run after which others have published."""
    root, job = f"{raw['output']}/published", loads(yaml.safe_dump(raw | {"publish": {}}))
    made = []
    for run_name in ("first", "second"):
        made.append(Artifact(run_name))
        for stage in (prepare, tokenize, train, evaluate, publish):
            made[-1] = stage(job, made[-1])
    first, second = made
    held = {
        file: file.stat().st_mtime_ns
        for file in Path(root).rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }
    capsys.readouterr()
    assert publish(job, second).published == f"{root}/second"
    assert publish(job, first).published == f"{root}/first"
    assert "first was published before, and second after it; the pointer stays" in capsys.readouterr().out
    assert published_versions.pointer(root) == published_versions.Pointer("second", ("first",))
    assert {file: file.stat().st_mtime_ns for file in held} == held


def test_a_first_training_goes_on_as_it_began_whatever_is_published_meanwhile(raw, tmp_path):
    job = loads(yaml.safe_dump(raw))
    begun = tokenize(job, retrain.prepare(job, Artifact("first")))
    train(retrain.starting_from_published(job, begun), begun)
    again(raw, "other")
    artifact = retrain.prepare(job, Artifact("first"))
    assert retrain.starting_from_published(job, artifact) == job
    assert (
        train(retrain.starting_from_published(job, artifact), tokenize(job, artifact)).run == f"{raw['output']}/first"
    )


def test_what_a_link_leads_to_is_what_counts(tmp_path):
    write_jsonl(tmp_path / "store" / "x.jsonl", [{"text": "a"}])
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x.jsonl").symlink_to(tmp_path / "store" / "x.jsonl")
    spec = {"s": SourceSpec(str(tmp_path / "source"))}
    before = stamps(spec)
    os.utime(tmp_path / "store" / "x.jsonl", ns=(0, 10**18))
    assert stamps(spec) != before


@pytest.mark.long
def test_what_was_gone_back_from_is_not_made_again(raw, tmp_path, capsys):
    root = f"{raw['output']}/published"
    again(raw, "first")
    sums(tmp_path, 150, 300)
    assert again(raw, "better").published == f"{root}/better"
    published_versions.roll_back(root)
    assert again(raw, "same") is None
    assert (
        "sums changed since first, but better has trained on these data already, and was published: loss/held_out "
        in capsys.readouterr().out
    )
    sums(tmp_path, 300, 400)
    more = again(raw, "more")
    assert more.models == {root: f"{root}/first"}


@pytest.mark.long
def test_what_was_tried_in_vain_is_not_tried_again_until_something_changes(raw, tmp_path, capsys):
    first = again(raw, "first")
    sums(tmp_path, 150, 300, wrong=True)
    (tmp_path / "data" / "0False.jsonl").unlink()
    assert again(raw, "worse").published is None
    assert again(raw, "same") is None
    said = capsys.readouterr().out
    assert "sums changed since first, but worse has trained on these data already, and was not published: " in said
    assert f"{first.metrics['loss/held_out']:.4g}" in said
    assert again({**raw, "train": {**raw["train"], "lr": 1e-9}}, "other-rate") is not None, (
        "another config may end otherwise"
    )
    sums(tmp_path, 0, 150)
    assert again(raw, "more") is not None


def test_files_of_one_name_and_files_of_no_data(tmp_path):
    """Each counts by its whole name below the source; what is no data does not count."""
    for name in ("a/x.jsonl", "b/x.jsonl"):
        write_jsonl(tmp_path / "source" / name, [{"text": name}])
    spec = {"s": SourceSpec(str(tmp_path / "source"))}
    before = stamps(spec)
    (tmp_path / "source" / "README.md").write_text("about")
    assert stamps(spec) == before
    shutil.copytree(tmp_path / "source", tmp_path / "moved")
    assert stamps({"s": SourceSpec(str(tmp_path / "moved"))}) == before, "copied with their times"
    for name in ("a/x.jsonl", "b/x.jsonl"):
        there = (tmp_path / "source" / name).stat()
        os.utime(tmp_path / "source" / name, ns=(0, 10**18))
        assert stamps(spec) != before
        os.utime(tmp_path / "source" / name, ns=(there.st_atime_ns, there.st_mtime_ns))
        assert stamps(spec) == before


def test_a_file_that_was_written_over_is_new_whatever_its_size(raw, tmp_path, capsys):
    """And what was tokenized before of the other is not used."""
    again(raw, "first")
    file = tmp_path / "data" / "0False.jsonl"
    text = file.read_text()
    file.write_text(text.replace("1", "2", 1))
    assert len(text) == file.stat().st_size
    capsys.readouterr()
    again(raw, "other")
    out = capsys.readouterr().out
    assert "sums changed since first" in out
    assert "tokenize: sums: 150 rows" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"publish": {}}, r"publish\.metric: retraining compares with the published version; name a metric"),
        (
            {"publish": {"metric": "train/loss"}},
            r"publish\.metric: retraining compares with the published version",
        ),
        ({"publish": {"metric": "loss/held_out", "gate": "unmeasured"}}, r"publish\.gate: retraining compares"),
    ],
)
def test_without_anything_to_compare_it_does_not_begin(raw, change, message):
    with pytest.raises(UserError, match=message):
        again(raw | change, "a")


def test_a_metric_that_is_not_there_is_named_with_those_that_are(raw):
    with pytest.raises(
        UserError, match=r"publish\.metric: the evaluation will have no 'loss/dev'; it will have .* loss/held_out"
    ):
        again(raw | {"publish": {"metric": "loss/dev"}}, "a")
    assert published_versions.pointer(f"{raw['output']}/published") is None


@pytest.mark.parametrize(
    "cron",
    [
        "0 3 * *",
        "61 * * * *",
        "* * 0 * *",
        "*/0 * * * *",
        "0 3 * * mo",
        "5-1 * * * *",
        "0 3 * * 1 2026",
        "1,,2 * * * *",
        "²  * * * *",
    ],
)
def test_what_is_no_schedule_is_refused(raw, cron):
    with pytest.raises(ConfigError, match=r"flow\.cron +.* is not a schedule"):
        loads(yaml.safe_dump(raw | {"flow": {"cron": cron}}))


@pytest.mark.parametrize("cron", ["0 3 * * 1", "*/15 0-6,22-23 1,15 jan-mar Mon-Fri", "0 0 1 1 *", "5/10 * * * 7"])
def test_schedules(raw, cron):
    assert loads(yaml.safe_dump(raw | {"flow": {"cron": cron, "event": "new.data"}})).flow.cron == cron


def flow(raw: dict, toy: Toy) -> str:
    (toy.directory / "job.yaml").write_text(yaml.safe_dump(raw | {"flow": {"cron": "0 3 * * 1", "event": "new.data"}}))
    done = toy("run", "--config", "job.yaml", flow=ROOT / "flows" / "retrain_flow.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def toy(tmp_path) -> Toy:
    (tmp_path / "flow").mkdir()
    return Toy(tmp_path / "flow")


@pytest.mark.long
def test_the_flow_ends_early_where_nothing_is_new(raw, toy):
    again(raw | {"train": {**raw["train"], "steps": 2}}, "first")
    said = flow(raw, toy)
    assert "nothing published: there are no new data" in said
    assert "/train/" not in said, "no such step"


@pytest.mark.cluster
def test_the_flow_trains_where_something_is(raw, toy):
    raw["train"]["steps"] = 2
    said = flow(raw, toy)
    assert "the first version is trained from" in said
    version = published_versions.pointer(f"{raw['output']}/published").version
    assert f"published  {raw['output']}/published/{version}" in said


def test_the_card_says_what_it_is_made_of_and_how_it_did(raw, tmp_path):
    raw["publish"]["license"] = "apache-2.0"
    first = again(raw, "first")
    sums(tmp_path, 150, 300)
    better = again(raw, "better")
    text = (Path(better.published) / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ptf", "sft"],
        "license": "apache-2.0",
        "model-index": [
            {
                "name": "better",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"name": "held_out", "type": "held_out"},
                        "metrics": [{"type": "loss", "name": "loss", "value": better.metrics["loss/held_out"]}],
                    }
                ],
            }
        ],
    }
    assert str(tmp_path) not in text, "nobody else has the paths of this machine"
    assert "from `first`" in text
    row = (
        f"| loss/held_out | {first.metrics['loss/held_out']:.4g} | {better.metrics['loss/held_out']:.4g} | "
        f"{first.metrics['loss/held_out']:.4g} |"
    )
    assert row in text, "start, now, and what was published before, which is the start"
    assert "published before (first)" in text
    assert f"| sums | `data` | auto | by rows | {better.data['sums']} |" in text
    assert "vllm serve DIRECTORY\n" in text
    job = loads(text.split("```yaml\n")[1].split("```")[0])
    trained = retrain.starting_from_published(loads(yaml.safe_dump(raw)), better)
    assert (job.train, job.recipe, job.publish) == (trained.train, trained.recipe, trained.publish), "it is a config"
    assert job.model == trained.model.model_copy(update={"path": "…/published"})
    assert "published before" not in (Path(first.published) / "README.md").read_text()
