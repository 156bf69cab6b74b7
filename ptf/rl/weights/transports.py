"""The transports of weights by the name that `rollout.transport` gives them: what each needs of a job.

Adding one adds an entry here, its name to the `Literal` of `RolloutConfig.transport`, and its code. A stored transport
(engines load buckets that exist as a whole) is a branch in `stored.collect` and in what `Controller.sync` and
`Learner.collect_weights` hand to it. A streaming one (engines read while the policy sends) is a branch on its name
where `Sender`, `Transfer` and `Receiver` of streamed.py make and read buffers, and in their type
`Literal["ipc", "nccl"]`, which `Learner.open_transfer` has too. `make reference` then writes the key's documentation.

The configuration's rules read this table too, so it imports no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptf.config.schema import Job


def no_faults(job: "Job") -> Iterator[str]:
    """Yield nothing: the transport works with every job."""
    yield from ()


@dataclass(frozen=True)
class Transport:
    """What a transport of weights does, and what a job must have for it."""

    # True: engines read while the policy sends, so that nothing can be sent again to one engine alone
    streams: bool = False
    in_files: bool = False  # True: the buckets are files in the run's directory
    from_every_rank: bool = False  # True: each rank of the policy sends; False: only its first
    faults: Callable[["Job"], Iterator[str]] = no_faults  # why a job cannot use it, one line for each reason


def streaming_faults(job: "Job") -> Iterator[str]:
    """Yield what keeps a job from sending weights while the engines read."""
    assert job.rollout is not None
    if job.compute.launcher != "ray":
        yield "policy and rollout need processes of their own: compute.launcher: ray"
    if job.rollout.engine not in ("native", "vllm"):
        yield "rollout.engine must be native or vllm"
    if job.rollout.lora == "adapter":
        yield "an adapter alone is small; give object_store or path"
    if job.model.backend == "hf":
        yield "model.backend: hf does not know the names of its tensors in advance; give object_store or path"


def ipc_faults(job: "Job") -> Iterator[str]:
    """Yield what keeps a job from sending weights through memory that policy and engine share."""
    assert job.rollout is not None
    yield from streaming_faults(job)
    if not share_a_pool(job) or job.rollout.workers * job.rollout.tensor != job.compute.workers:
        yield "policy and rollout must be in one pool, with as many rollout.workers × rollout.tensor as compute.workers"


def nccl_faults(job: "Job") -> Iterator[str]:
    """Yield what keeps a job from broadcasting weights to devices of other roles."""
    yield from streaming_faults(job)
    if share_a_pool(job):
        yield "policy and rollout must be in different compute.pools"


def share_a_pool(job: "Job") -> bool:
    """Return whether policy and rollout use the same devices."""
    pools = job.compute.pools.values()
    return not pools or any({"policy", "rollout"} <= set(pool.roles) for pool in pools)


TRANSPORTS = {
    # through host memory, all tensors at once
    "object_store": Transport(),
    # through files in the run's directory, 256 MiB at a time
    "path": Transport(in_files=True),
    # through memory that policy and engine share, from each rank of the policy to the engine on its device
    "ipc": Transport(streams=True, from_every_rank=True, faults=ipc_faults),
    # by a broadcast from the policy's first rank
    "nccl": Transport(streams=True, faults=nccl_faults),
}


def chosen(job: "Job", gpu: bool) -> str:
    """Return the transport that a job uses: what `rollout.transport` names, or for `auto` the fastest that it can use.

    `gpu` is whether the roles have GPUs. On a CPU, and for an adapter, host memory takes the weights as they are.
    """
    assert job.rollout is not None
    if job.rollout.transport != "auto":
        return job.rollout.transport
    if not gpu or job.compute.launcher != "ray" or job.rollout.lora == "adapter":
        return "object_store"
    return next((name for name in ("ipc", "nccl") if not any(TRANSPORTS[name].faults(job))), "path")


def faults(job: "Job") -> list[str]:
    """Return the problems of `rollout.transport` with the rest of the job, as lines that begin with the key."""
    assert job.rollout is not None
    name = job.rollout.transport
    if name == "auto":
        return []
    return [f"rollout.transport: {name}: {problem}" for problem in TRANSPORTS[name].faults(job)]
