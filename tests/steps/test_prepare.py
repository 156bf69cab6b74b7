"""The prepare step makes the models that a job takes from other jobs: each once,
and each under a name of its own."""

from pathlib import Path

import pytest
import yaml

from ptf import storage
from ptf.artifact import Artifact
from ptf.config import Job, load, loads
from ptf.run import write_job_file
from steps import stages as module
from tests.tiny import arithmetic


@pytest.fixture
def raw(tmp_path, monkeypatch) -> dict:
    """A student and two teachers from other jobs, one of which begins with the other's model;
    publishing is a pointer that appears."""
    raw = arithmetic(tmp_path)
    for name, start in (("first", str(tmp_path / "model")), ("second", f"job:{tmp_path / 'first.yaml'}")):
        model = {**raw["model"], "path": start}
        (tmp_path / f"{name}.yaml").write_text(
            yaml.safe_dump({**raw, "model": model, "publish": {"to": str(tmp_path / "published" / name)}})
        )
    teachers = {name: {"path": f"job:{tmp_path / name}.yaml"} for name in ("second", "first")}
    return {**raw, "recipe": "kd", "algo": {"teachers": teachers}, "model": {"path": f"job:{tmp_path / 'second.yaml'}"}}


def publish(job: Job, run_name: str) -> None:
    place = Path(str(job.publish.to))
    (place / run_name).mkdir(parents=True)
    storage.commit(place / run_name, {"version": run_name})
    (place / "latest.json").write_text(f'{{"version": "{run_name}"}}')


def test_each_is_made_once_under_a_name_of_its_own(raw, tmp_path, monkeypatch):
    made: list[str] = []

    def stages(job: Job, run_name: str) -> None:
        if job.model.path.startswith("job:") and not any("first" in name for name in made):
            stages(load(job.model.path.removeprefix("job:")), f"{run_name}-first")  # its own prepare step
        made.append(run_name)
        publish(job, run_name)

    monkeypatch.setattr(module, "_run_stages", stages)
    job = loads(yaml.safe_dump(raw))
    artifact = module.prepare(job, Artifact(run_name="kd-1"))
    assert sorted(made) == ["kd-1-second", "kd-1-second-first"]
    done = artifact.resolve(job)
    assert done.model.path == str(tmp_path / "published" / "second" / "kd-1-second")
    assert done.algo.teachers["first"].path == str(tmp_path / "published" / "first" / "kd-1-second-first")
    assert module.prepare(job, Artifact(run_name="kd-2")).models == artifact.models
    assert len(made) == 2


def test_an_attempt_keeps_the_teachers_that_it_began_with(raw, tmp_path):
    for name in ("first", "second"):
        publish(load(str(tmp_path / f"{name}.yaml")), "v1")
    job = loads(yaml.safe_dump(raw))
    begun = module.prepare(job, Artifact(run_name="kd-1")).resolve(job)
    write_job_file(begun, Path(job.output) / "kd-1")
    (Path(job.output) / "kd-1" / "metrics.jsonl").write_text("{}\n")  # it has made a step
    for name in ("first", "second"):
        publish(load(str(tmp_path / f"{name}.yaml")), "v2")
    assert module.prepare(job, Artifact(run_name="kd-1")).resolve(job) == begun
    assert module.prepare(job, Artifact(run_name="kd-2")).resolve(job) != begun
