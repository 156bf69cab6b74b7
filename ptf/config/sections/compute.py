"""The section `compute`: where a run runs, on how many devices, and how they divide the model."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field

from ptf.config.section import Count, Positive, PositiveFloat, Section, changeable


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """The number of ranks along each axis of the mesh:
    rank = ((replicate · shards + shard) · contexts + context) · tensors + tensor."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in asdict(self).items())

    @property
    def data(self) -> int:
        """Number of ranks that see different data."""
        return self.replicate * self.shard

    @property
    def model(self) -> int:
        """Number of neighbouring ranks that hold every layer together and see the same data."""
        return self.context * self.tensor

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.data * self.model


class MeshConfig(Section):
    """How the workers divide model and sequences: `replicate` × shards × `context_parallel_size` ×
    `tensor_parallel_size` = workers."""

    replicate: Positive = changeable(1)
    """Number of copies of the sharded model (HSDP); gradients are reduced over the copies too."""
    tensor_parallel_size: Positive = changeable(1)
    """Number of workers that hold every layer together and see the same sequences. Tensor
    parallelism divides attention heads, key-value heads, MLPs, experts and vocabulary; the size must divide each of
    these numbers."""
    context_parallel_size: Positive = changeable(1)
    """Number of workers that see the same sequences and hold a part of each: for documents that do not fit one device.
    Short documents train faster as more sequences of fewer tokens. It must divide the attention heads that tensor
    parallelism leaves to a worker, the heads of linear attention and the rows of the vocabulary; it must divide the
    key-value heads, or be a multiple of them."""

    def sizes(self, workers: int) -> MeshSizes:
        """Divide that many workers, of which none is left over (`ptf.config.rules`)."""
        replicate, context, tensor = self.replicate, self.context_parallel_size, self.tensor_parallel_size
        shard = workers // (replicate * context * tensor)
        return MeshSizes(replicate=replicate, shard=shard, context=context, tensor=tensor)


class PoolConfig(Section):
    """Devices that some roles of an online job use in turn, and that no other role uses."""

    roles: Annotated[list[str], Field(min_length=1)]
    """The roles of the pool: any of `policy`, `rollout`, `critic`, `reference`, `teacher` and `reward_model`
    that the job has. The pool has as many devices as its largest role needs."""
    offload: Literal["auto", "disk"] = changeable("auto")
    """Where the weights and the optimizer of a role are while another role uses the devices. `auto`: in host memory;
    without a GPU they stay in place. `disk`: in files under the run's directory, also on a CPU, for models that do not
    fit into memory together."""


class ComputeConfig(Section):
    """Where the run runs, and on how many devices."""

    launcher: Literal["ray", "torchrun", "local"] = changeable("ray")
    """`ray`: Ray actors; an offline recipe with one worker and no `address` runs in this process without Ray.
    `torchrun`: subprocesses on this machine. `local`: this process, one worker."""
    workers: Positive = changeable(1)
    """Number of training processes, one per GPU. Online: of each role that holds a model (policy, critic, reference,
    teacher, reward model); the rollout has `rollout.replicas` × `rollout.tensor_parallel_size`. Roles of one pool use
    the same GPUs in turn, so a pool has as many as its largest role."""
    mesh: MeshConfig = MeshConfig()
    """How the workers divide the model."""
    pools: dict[str, PoolConfig] = changeable({})
    """Online recipes: which roles share devices (colocated), and which have their own. Default: one pool of all
    roles."""
    device: Literal["auto", "cpu", "cuda"] = changeable("auto")
    """`auto` uses the GPU if there is one, and prints which device it uses."""
    threads: Positive | None = changeable(None)
    """CPU threads of each worker; default: cores divided by the workers of a role on one machine. The cores are
    those of the worker's machine, in online recipes those of the machine that starts the run."""
    address: str | None = changeable(None)
    """A running Ray cluster: `host:port` to join it from here (`auto`: the one in RAY_ADDRESS), or `http://host:8265`
    to submit the run as a job of the cluster. Such a job continues if this process dies, and is found again by the
    run's name. By default a cluster is started for the run and stopped after it. If the cluster requires a
    token, the token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is used."""
    timeout_s: PositiveFloat = changeable(1800.0)
    """The deadline, in seconds, of any single collective, of any call of a role (so all rollouts of one step must end
    within it, or the run ends), and of the start of Ray or of a worker. If Ray does not start or does not answer, it
    is tried again until this deadline. Two limits do not depend on it: an engine is replaced after 60 s without a
    heartbeat, and a submitted Ray job is given up when its dashboard has not answered for 300 s."""
    restarts: Count = changeable(2)
    """Online recipes on Ray: maximum number of restarts of failed processes before the run ends. It limits two counts.
    A rollout engine that fails is replaced at most this many times in one rollout; its successor gets the newest
    weights and the requests that were not answered. If another role fails, all roles restart from the newest
    checkpoint, at most this many times from the same one."""
