"""A transport of weights from the policy's ranks to the engines, as the controller uses it; `rollout.transport` chooses
one of those that ptf/config/transports.py lists."""

from abc import ABC, abstractmethod
from pathlib import Path

from ptf.config import Job, plugin
from ptf.config.transports import TRANSPORTS, resolve_transport
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.weights.verification import Buckets, Manifest, Receipt

SYNC = "sync"  # directory in the run's, for transports that write files


class Transport(ABC):
    """Carries weights: for each sync the controller calls `open`, then `send`."""

    def __init__(self, name: str, job: Job, run: Path) -> None:
        self.name, self.directory = name, run / SYNC
        self.adapter = job.online_rollout.lora_sync == "adapter"
        self.engines = job.online_rollout.replicas * job.online_rollout.tensor_parallel_size
        self.timeout_s = job.compute.timeout_s

    @abstractmethod
    def open(self, policy: RoleGroup, version: int) -> tuple[Buckets, Manifest]:
        """Return what the engines are to read, and its manifest; the policy is in memory. Buckets in a sequence are
        compared with the manifest tensor by tensor; others must compare checksums themselves, as `Streamed` does."""

    @abstractmethod
    def send(
        self, cluster: Cluster, policy: RoleGroup, rollout: RoleGroup, weights: Buckets, manifest: Manifest
    ) -> Receipt:
        """Have all engines read it, and return what they acknowledge."""


def transport_of(job: Job, run: Path, gpu: bool) -> Transport:
    """Return the transport of a job, whose roles have GPUs or not."""
    name = resolve_transport(job, gpu)
    return plugin.resolve(TRANSPORTS[name].code)(name, job, run)
