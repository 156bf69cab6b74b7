"""Jobs that are submitted to a Ray cluster: what is found under a name, and a cluster that never answers."""

import contextlib
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from ptf.compute import ray_jobs
from ptf.errors import Retryable


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
    monkeypatch.setattr(ray_jobs, "EVERY_S", 0.01)
    monkeypatch.setattr(ray_jobs.ray_authentication, "of_cluster", lambda _: contextlib.nullcontext())
    with (
        pytest.raises(Retryable, match="no Ray cluster takes jobs at http://here after 0 s: nobody listens"),
        ray_jobs._connected("http://here", 0.05),
    ):
        pass
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
    outcome = ray_jobs._follow(Client(), "here", "a-job", ["train"], lambda: None)
    assert (outcome.status, submitted) == (JobStatus.SUCCEEDED, ["a-job"])
    assert capsys.readouterr().out == "job a-job submitted to here\nfirst\nsecond\n"
