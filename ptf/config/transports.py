"""The transports of weights by the name that `rollout.transport` gives them: the code of each, what it needs of a job,
when `auto` tries it, and what a sync by it moves.

To add one, add a file with its class (a subclass of `Transport`, ptf/rl/weights/transport.py, or of one of those that
are there), and an entry to `TRANSPORTS`, where `auto` takes the first that is a candidate. What it needs beyond
`streams` and `one_pool` is a sentence of `rules_of`. If it uses a link that no other transport does, add its rate to
`RATES` (online_budget.py). The key's description (sections/rollout.py) says what it is for; `make reference` writes its
values.

The rules of the configuration, `ptf plan` (online_budget.py) and the controller read this table. It imports
no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ptf.config.section import Rules

if TYPE_CHECKING:
    from ptf.config.schema import Job


@dataclass(frozen=True)
class TransportFacts:
    """What a transport of weights does, and what a job must have for it."""

    code: str  # its class, as module:name
    # link, a key of `online_budget.RATES` → how often all bytes pass over it
    link_crossings: Mapping[str, int]
    # True: engines read while the policy sends. Policy and engines are then in memory together, a sync takes at
    # least as long as its slowest link, and weights cannot be sent again to one engine alone
    streams: bool = False
    in_files: bool = False  # True: the buckets are files in the run's directory
    # of those that stream: True: policy and rollout are in one pool, and each rank sends to the engine on its device;
    # False: they are in different ones
    one_pool: bool = False
    only_from_gpus: bool = False  # True: `auto` tries it only where whole weights are sent from GPUs to GPUs


def rules_of(job: "Job", transport: TransportFacts) -> Rules:
    """Return what a job must keep to use a transport, without the key."""
    if not transport.streams:
        return {}
    rollout, pools = job.online_rollout, job.compute.pools.values()
    together = not pools or any({"policy", "rollout"} <= set(pool.roles) for pool in pools)
    fits = together and rollout.replicas * rollout.tensor_parallel_size == job.compute.workers
    return {
        "policy and rollout need processes of their own: compute.launcher: ray": job.compute.launcher != "ray",
        "rollout.engine must be native or vllm": rollout.engine not in ("auto", "native", "vllm"),
        "sends whole models only, but rollout.lora_sync is adapter; use object_store or files, or lora_sync: merged": (
            rollout.lora_sync == "adapter"
        ),
        "model.backend: hf does not know the names of its tensors in advance; give object_store or files": (
            job.model.backend == "hf"
        ),
        "policy and rollout must be in one pool, with as many rollout.replicas × rollout.tensor_parallel_size as "
        "compute.workers": transport.one_pool and not fits,
        "policy and rollout must be in different compute.pools": not transport.one_pool and together,
    }


# of transports that store all buckets: from the GPU, digest, into the store; and back
STORED = {"gather": 1, "host_link": 2, "digest_on_device": 1, "digest_on_host": 1}
# in the order in which `auto` tries them: those that stream; `files`, without a second copy in host memory; the rest
TRANSPORTS = {
    # through memory that policy and engine share, from each rank of the policy to the engine on its device: two copies
    # within the GPU, into the shared buffer and out of it
    "ipc": TransportFacts(
        code="ptf.rl.weights.ipc:Ipc",
        link_crossings={"gather": 1, "device": 2, "digest_on_device": 2},
        streams=True,
        one_pool=True,
        only_from_gpus=True,
    ),
    # by a broadcast from the policy's first rank
    "nccl": TransportFacts(
        code="ptf.rl.weights.nccl:Nccl",
        link_crossings={"gather": 1, "digest_on_device": 2},
        streams=True,
        only_from_gpus=True,
    ),
    # through files in the run's directory, 256 MiB at a time
    "files": TransportFacts(
        code="ptf.rl.weights.stored:Stored",
        link_crossings=STORED | {"disk": 2},
        in_files=True,
        only_from_gpus=True,
    ),
    # through host memory, all tensors at once
    "object_store": TransportFacts(
        code="ptf.rl.weights.stored:Stored",
        link_crossings=STORED | {"host": 2},
    ),
}


if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[("auto", *TRANSPORTS)]


MAX_RANK_FOR_AUTO_ADAPTER_SYNC = 128  # vLLM serves four times as much


def with_lora_sync(job: "Job", gpu: bool, experts: bool) -> "Job":
    """Return the job with `rollout.lora_sync: merged` or `adapter` in place of `auto`.

    `gpu`: whether the roles have GPUs; `experts`: whether the model is a mixture of experts.
    """
    rollout, model, lora = job.online_rollout, job.model, job.model.lora
    if rollout.lora_sync != "auto":
        return job
    adapter_is_servable = (
        lora is not None and lora.rank <= MAX_RANK_FOR_AUTO_ADAPTER_SYNC and model.quantization != "nf4" and not experts
    )
    only_adapters_train = not (model.trainable or model.tokens or model.replace or model.head) and model.backend != "hf"
    engine_applies_adapters = (
        gpu and job.compute.launcher == "ray" and rollout.engine == "vllm" and job.train.precision == "bf16"
    )
    transport_sends_adapters = rollout.transport == "auto" or not TRANSPORTS[rollout.transport].streams
    adapter = adapter_is_servable and only_adapters_train and engine_applies_adapters and transport_sends_adapters
    value = "adapter" if adapter else "merged"
    return job.model_copy(update={"rollout": rollout.model_copy(update={"lora_sync": value})})


def resolve_transport(job: "Job", gpu: bool) -> str:
    """Return the transport that a job uses: what `rollout.transport` names; for `auto`, the first that it can use.

    `gpu` is whether the roles have GPUs.
    """
    if job.online_rollout.transport in TRANSPORTS:
        return job.online_rollout.transport
    # on a CPU, or for an adapter alone, `object_store` is as good
    from_gpus = gpu and job.compute.launcher == "ray" and job.online_rollout.lora_sync != "adapter"
    return next(
        name
        for name, transport in TRANSPORTS.items()
        if (from_gpus or not transport.only_from_gpus) and not any(rules_of(job, transport).values())
    )


def config_rules(job: "Job") -> Rules:
    """Return what a job must keep to use the transport that it names."""
    name = job.online_rollout.transport
    rules = rules_of(job, TRANSPORTS[name]) if name in TRANSPORTS else {}  # else: auto
    return {f"rollout.transport: {name}: {rule}": is_broken for rule, is_broken in rules.items()}


def advice(job: "Job", gpu: bool) -> list[str]:
    """Return a line that says how `auto` could choose a transport that streams, if one key prevents it."""
    rollout, workers = job.online_rollout, job.compute.workers
    if rollout.transport in TRANSPORTS or workers % rollout.tensor_parallel_size:
        return []
    replicas = workers // rollout.tensor_parallel_size
    other = job.model_copy(update={"rollout": rollout.model_copy(update={"replicas": replicas})})
    now, then = resolve_transport(job, gpu), resolve_transport(other, gpu)
    if TRANSPORTS[now].streams or not TRANSPORTS[then].streams:
        return []
    return [f"weights: with rollout.replicas: {replicas} they would go by {then}"]
