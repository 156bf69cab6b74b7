"""A run as a job of a Ray cluster: submitted once, found again by its name, followed to its end.

The one idea: the job is named by the lineage, so whoever asks for the same run again, a retry or a resume after the first driver died, finds it
running and goes on listening; only one that failed or was stopped is submitted anew, and then continues from its checkpoint.
"""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ptf.compute.ray_session  # noqa: F401  first: it sets what Ray reads when it is imported

# isort: split
from ray.job_submission import JobStatus, JobSubmissionClient

from ptf.compute import ray_authentication
from ptf.compute.launch import LAUNCHED
from ptf.errors import Retryable

EVERY_S = 1.0
LOST_S = 300.0  # without an answer from the cluster
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


@dataclass(frozen=True)
class Following:
    """What became of a job, and whether it was there before."""

    found: bool
    status: JobStatus
    message: str
    code: int | None  # exit status of its command, where it had one


def named(lineage: str, step: str) -> str:
    return f"ptf-{lineage}-{step}"


def follow(address: str, name: str, command: Sequence[str], timeout_s: float, *, anew: Callable[[], None]) -> Following:
    """Submit the command under this name, to be run in this directory, unless it is running there, and print its lines until it ends. `anew` is called
    before it is submitted. Raises UserError where the cluster wants another token or has none, Retryable where it does not answer within `timeout_s` at the
    start, and where it has not answered for `LOST_S` later; the job is then still there."""
    with _connected(address, timeout_s) as client:
        return _follow(client, address, name, command, anew)


def _follow(client: JobSubmissionClient, address: str, name: str, command: Sequence[str], anew: Callable[[], None]) -> Following:
    found = _running(client, name)
    if found:
        print(f"job {name} is running on {address}: following it", flush=True)
    else:
        anew()
        client.submit_job(entrypoint=f"cd {shlex.quote(os.getcwd())} && {LAUNCHED}=1 exec {shlex.join(command)}", submission_id=name)
        print(f"job {name} submitted to {address}", flush=True)
    seen, answered = 0, time.monotonic()
    while True:
        try:
            info = client.get_job_info(name)
            lines = client.get_job_logs(name)
            answered = time.monotonic()
        except (RuntimeError, ConnectionError, OSError) as error:
            if time.monotonic() - answered > LOST_S:
                raise Retryable(f"the cluster at {address} has not answered for {LOST_S:g} s ({error}); job {name} may still be running there") from error
            time.sleep(EVERY_S)
            continue
        print(lines[seen:], end="", flush=True)
        seen = len(lines)
        if info.status in ENDED:
            return Following(found, info.status, info.message or "", info.driver_exit_code)
        time.sleep(EVERY_S)


@contextlib.contextmanager
def _connected(address: str, timeout_s: float) -> Iterator[JobSubmissionClient]:
    deadline, said = time.monotonic() + timeout_s, False
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(ray_authentication.of_cluster(address))
                client = JobSubmissionClient(address)
                break
            except (ConnectionError, RuntimeError) as error:
                stack.close()
                if time.monotonic() > deadline:
                    raise Retryable(f"compute.address: no Ray cluster takes jobs at {address} after {timeout_s:.0f} s: {error}") from error
                if not said:
                    print(f"no Ray cluster takes jobs at {address} ({error}); it is asked again for {timeout_s:.0f} s", flush=True)
                said = True
                time.sleep(EVERY_S)
        yield client


def _running(client: JobSubmissionClient, name: str) -> bool:
    """Whether the job is on its way; one that has ended without success is forgotten."""
    jobs = {job.submission_id: job for job in client.list_jobs()}
    if name not in jobs:
        return False
    if jobs[name].status in ENDED:
        client.delete_job(name)
        return False
    return True
