"""Jobs that are submitted to a Ray cluster: what is found under a name, and a cluster that never answers."""

import contextlib
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from ptf.compute import ray_authentication, ray_jobs, shutdown
from ptf.compute.lease import RunInUse, hold_lease
from ptf.config import loads
from ptf.errors import Retryable, UserError
from ptf.run import JOB, run, submit_and_wait

TEXT = """recipe: sft
output: {output}
model: {{path: m}}
data: {{seq_len: 8, sources: {{s: {{path: d.jsonl}}}}}}
train: {{steps: 1, lr: 1e-3}}
"""


class Jobs:
    """A client with these jobs."""

    def __init__(self, **status: JobStatus):
        self.jobs = [SimpleNamespace(submission_id=name, status=value) for name, value in status.items()]
        self.deleted = list[str]()

    def list_jobs(self):
        return self.jobs

    def delete_job(self, name: str):
        self.deleted.append(name)


def test_a_job_runs_until_it_ends_and_then_its_name_is_free():
    client = Jobs(waits=JobStatus.PENDING, runs=JobStatus.RUNNING, done=JobStatus.SUCCEEDED, broke=JobStatus.FAILED)
    found = {name: ray_jobs._running(client, name) for name in ("waits", "runs", "done", "broke", "absent")}
    assert found == {"waits": True, "runs": True, "done": False, "broke": False, "absent": False}
    assert client.deleted == ["done", "broke"]


def test_a_cluster_that_takes_no_jobs_is_an_error_after_the_deadline(monkeypatch, capsys):
    attempts = []

    def refused(address):
        attempts.append(address)
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(ray_jobs, "JobSubmissionClient", refused)
    monkeypatch.setattr(ray_authentication, "EVERY_S", 0.01)
    monkeypatch.setattr(ray_authentication, "of_cluster", lambda _: contextlib.nullcontext())
    with pytest.raises(Retryable, match="no Ray cluster takes jobs at http://here after 0 s: nobody listens"):
        ray_jobs.follow("http://here", "run", [], 0.05, anew=lambda: None)
    assert len(attempts) > 1
    assert capsys.readouterr().out.count("trying again") == 1


def test_the_output_of_a_job_is_printed_whole_and_once(monkeypatch, capsys):
    submitted = []
    answers = iter([("RUNNING", "first\n"), ("SUCCEEDED", "first\nsecond\n")])

    class Client(Jobs):
        def submit_job(self, entrypoint: str, submission_id: str):
            submitted.append(submission_id)

        def get_job_info(self, name: str):
            status, self.logs = next(answers)
            return SimpleNamespace(status=JobStatus(status), message="", driver_exit_code=0)

        def get_job_logs(self, name: str):
            return self.logs

    monkeypatch.setattr(ray_jobs, "EVERY_S", 0.01)
    monkeypatch.setattr(ray_jobs, "JobSubmissionClient", lambda _: Client())
    monkeypatch.setattr(ray_authentication, "of_cluster", lambda _: contextlib.nullcontext())
    outcome = ray_jobs.follow("here", "a-job", ["train"], 1.0, anew=lambda: None)
    assert (outcome.status, submitted) == (JobStatus.SUCCEEDED, ["a-job"])
    assert capsys.readouterr().out == "job a-job submitted to here\nfirst\nsecond\n"


@pytest.mark.parametrize(
    ("status", "code", "stopped", "raised"),
    [
        (JobStatus.SUCCEEDED, 0, False, None),
        (JobStatus.FAILED, 2, False, UserError),  # the job was refused
        (JobStatus.FAILED, 2, True, Retryable),  # it ended because it was asked to stop
        (JobStatus.FAILED, 1, False, Retryable),
        (JobStatus.STOPPED, None, False, Retryable),
    ],
)
def test_a_job_that_does_not_succeed_is_refused_or_may_be_repeated(
    tmp_path, monkeypatch, status, code, stopped, raised
):
    job = loads(TEXT.format(output=tmp_path))
    if stopped:
        (tmp_path / shutdown.STOP).touch()
    followed = []

    def follow(address, name, command, timeout_s, anew):
        followed.append((name, command))
        return SimpleNamespace(status=status, message="what it said last", driver_exit_code=code)

    monkeypatch.setattr(ray_jobs, "follow", follow)
    expected = pytest.raises(raised, match="what it said last") if raised else contextlib.nullcontext()
    with expected as found:
        submit_and_wait(job, "a", tmp_path)
    assert not raised or type(found.value) is raised
    [(name, command)] = followed
    assert name == "ptf-a-train"
    assert command[-1] == f"output={tmp_path}"


def test_a_run_that_another_process_writes_is_not_begun_anew(tmp_path, monkeypatch):
    job = loads(TEXT.format(output=tmp_path), ["compute.address=http://here"])

    def follow(*_, anew):
        anew()
        return SimpleNamespace(status=JobStatus.SUCCEEDED, message=None, driver_exit_code=0)

    monkeypatch.setattr(ray_jobs, "follow", follow)
    start = tmp_path / "a" / "start"  # of an attempt that has made no step
    start.mkdir(parents=True)
    with hold_lease(job, tmp_path / "a"), pytest.raises(RunInUse):
        run(job, "a")
    assert start.exists()
    assert not (tmp_path / "a" / JOB).exists()
    run(job, "a")
    assert not start.exists()
