"""A run as a job of a Ray cluster: submitted once, found again by its name, followed to its end.

The job is named after the run, so a retry or a resume of the same run, after the first driver died, finds it running
and follows it; only a job that failed or was stopped is submitted again, and then continues from its checkpoint.
"""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial

import ptf.compute.ray_session  # noqa: F401  first: it sets what Ray reads when it is imported

# isort: split
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from ptf.compute.launch import LAUNCHED
from ptf.compute.ray_authentication import EVERY_S, connected
from ptf.errors import Retryable

LOST_S = 300.0  # without a reply of the cluster
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def follow(
    address: str, name: str, command: Sequence[str], timeout_s: float, *, anew: Callable[[], None]
) -> JobDetails:
    """Submit the command under this name, in this directory, unless it is running already, and print its lines until it
    ends.

    `anew` is called before it is submitted. Raises UserError if the cluster needs another token or has none, Retryable
    if it does not answer within `timeout_s` at the start, or for `LOST_S` later; the job then still exists.
    """
    with connected(address, timeout_s, "takes jobs", partial(JobSubmissionClient, address)) as client:
        if _running(client, name):
            print(f"job {name} is running on {address}: following it", flush=True)
        else:
            anew()
            client.submit_job(
                entrypoint=f"cd {shlex.quote(os.getcwd())} && {LAUNCHED}=1 exec {shlex.join(command)}",
                submission_id=name,
            )
            print(f"job {name} submitted to {address}", flush=True)
        printed, answered = 0, time.monotonic()
        while True:
            try:
                info = client.get_job_info(name)
                lines = client.get_job_logs(name)
                answered = time.monotonic()
            except (RuntimeError, ConnectionError, OSError) as error:
                if time.monotonic() - answered > LOST_S:
                    raise Retryable(
                        f"the cluster at {address} has not answered for {LOST_S:g} s ({error}); "
                        f"job {name} may still be running there"
                    ) from error
                time.sleep(EVERY_S)
                continue
            print(lines[printed:], end="", flush=True)
            printed = len(lines)
            if info.status in ENDED:
                return info
            time.sleep(EVERY_S)


def _running(client: JobSubmissionClient, name: str) -> bool:
    """Return whether the job is queued or running; a job that has ended is deleted, so that its name is free."""
    jobs = {job.submission_id: job for job in client.list_jobs()}
    if name not in jobs:
        return False
    if jobs[name].status in ENDED:
        client.delete_job(name)
        return False
    return True
