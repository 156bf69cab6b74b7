"""Run an online job: start its roles, and the controller that trains.

Every problem of the job that can be found without a role is reported before a role is started.
"""

import contextlib
from pathlib import Path

from ptf.compute.checkpoint import Checkpoints
from ptf.compute.lease import Lease
from ptf.compute.shutdown import is_asked_to_stop
from ptf.config import Job, Plugin
from ptf.config.transports import advice
from ptf.errors import Lost, Retryable, UserError, full_text
from ptf.rl.controller import Controller
from ptf.rl.job_cluster import job_cluster, pools_of
from ptf.rl.online_job import OnlineJob
from ptf.rl.weights.verification import SyncError
from ptf.workspace import progress
from ptf.workspace.credentials import redacted


def train_online(job: Job, run: Path, lease: Lease) -> None:
    """Train to the end, from the newest checkpoint in `run` if there is one; write `run/model`, a Hugging Face
    directory.

    On Ray, a failed attempt is repeated from the newest checkpoint, at most `compute.restarts` times without a newer
    one.
    """
    saves = Checkpoints.of(job, run)
    failed_at, failures, last_error = -1, 0, ""
    while True:
        try:
            with progress.stage("train"):
                return attempt(job, run, lease)
        except (UserError, SyncError, TimeoutError):
            raise
        except Exception as error:
            newest = saves.latest()
            step = newest[0] if newest else 0
            failures, repeated = (failures + 1, str(error) == last_error) if step == failed_at else (1, False)
            if (
                job.compute.launcher != "ray"
                or failures > job.compute.restarts
                or (repeated and not isinstance(error, Lost))
            ):
                raise
            if is_asked_to_stop(run):
                raise Retryable(f"the run failed after a request to stop: {error}") from error
            failed_at, last_error = step, str(error)
            print(
                f"{redacted(full_text(error))}\nstarted again from step {step} ({failures} of {job.compute.restarts}, "
                "compute.restarts)",
                flush=True,
            )


def attempt(job: Job, run: Path, lease: Lease) -> None:
    """Make one attempt of `train_online`: start the job's roles, train, and export the model. A failure is raised."""
    online = OnlineJob.of(job, run)
    roles = online.roles()
    pools = pools_of(job.compute.pools, {name: role.mesh.ranks for name, role in roles.items()})
    with job_cluster(job, run, pools) as cluster:
        groups = {name: cluster.start(role) for name, role in roles.items()}
        with contextlib.closing(Controller(online, cluster, groups, lease)) as controller:
            config, sent = online.rollout, f" lora_sync={online.rollout.lora_sync}" if job.model.lora else ""
            engine = config.engine.use if isinstance(config.engine, Plugin) else config.engine
            print(
                f"rollout: engine={engine} replicas={config.replicas} "
                f"tensor_parallel_size={config.tensor_parallel_size}\n"
                f"weights: transport={controller.transport.name} dtype={job.train.precision}{sent}",
                *advice(online.job, cluster.gpu),
                sep="\n",
                flush=True,
            )
            controller.run()
