"""The memory of an online job on the devices of each pool, phase by phase, computed before the job is started.

Between its phases a role holds its weights, and a role that trains also holds its optimizer state; gradients exist only
in the update. On a GPU, while one role of a pool works, the pool's other roles are offloaded to host memory. vLLM takes
a share of the GPU for its weights and cache; while it is offloaded, it holds nothing there. A sync has the policy and
the engines in memory in turn, or together (`ipc`).

The policy, the critic and the frozen models are counted as in offline jobs (`ptf.train.budget`). CUDA's own memory, and
what libraries take for their kernels, is not counted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ptf.config import Job
from ptf.config.sections.rollout import RolloutConfig
from ptf.config.transports import TRANSPORTS, resolve_transport, with_lora_sync
from ptf.errors import UserError
from ptf.model import bridge
from ptf.recipes import registry
from ptf.recipes.protocol import Recipe
from ptf.rl.cluster import Pool
from ptf.rl.engine_settings import WIDTH
from ptf.rl.engines.native import BATCH
from ptf.rl.job_cluster import pools_of
from ptf.rl.weights.stored import BUCKET_BYTES
from ptf.train.budget import GIB, Budget, budget, config_directory, frozen_memory
from ptf.train.model_source import needs_weights

# bytes per second of each link: estimates for a machine of eight H100
RATES = {
    "gather": 300e9,  # between the GPUs of a machine (NVLink)
    "device": 2.0e12,  # within the memory of a GPU
    "host_link": 50e9,  # between a GPU and host memory (PCIe 5)
    "host": 10e9,  # a copy within host memory, as into an object store
    "disk": 2e9,  # files that all machines of the job can read
    "digest_on_device": 150e9,  # a checksum that is computed on a GPU: about twenty passes over its memory
    "digest_on_host": 4e9,  # the same on two cores (2 GB/s each, measured)
}


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of a role on the fullest of its devices."""

    workers: int  # devices
    held: float  # between the role's phases, while it is not offloaded
    phases: Mapping[str, float]  # phase → bytes in addition to `held`


@dataclass(frozen=True, slots=True)
class Engine:
    """What a rollout engine has room for."""

    memory: RoleMemory
    weights: float  # bytes on each device
    cache: float  # bytes on each device for keys and values
    responses: float  # how many responses of `data.seq_len` tokens the caches of all engines hold at once


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """The devices that some roles share."""

    name: str
    devices: int
    phases: Mapping[str, Mapping[str, float]]  # phase → role → bytes on the fullest device

    def total(self, phase: str) -> float:
        """Return the bytes of all roles in a phase."""
        return sum(self.phases[phase].values())


@dataclass(frozen=True)
class SyncTraffic:
    """What one sync moves."""

    sent: int  # bytes of all tensors that are sent, each once
    host: int  # bytes that host memory or files hold at once; 0 if the engines read while the policy sends
    seconds: float  # the least that the sync takes


@dataclass(frozen=True, slots=True)
class OnlineBudget:
    """What an online job needs, and what a step moves from the policy to the engines."""

    pools: Sequence[PoolBudget]
    update: Budget  # of the policy alone
    engine: Engine
    transport: str
    sync: SyncTraffic
    host: float  # bytes of host memory per worker, for what the worker's pool offloads and what a sync carries
    copied: float  # bytes of host memory per worker while a checkpoint is written: the policy's and the critic's copies
    room: float  # bytes of a GPU
    problems: Sequence[str]

    @property
    def gpus(self) -> int:
        """Number of GPUs of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def fits(self) -> bool:
        """Whether every phase fits the GPU."""
        return not self.problems


def online_budget(
    job: Job, directory: Path, gpus: int, *, room_gib: float = 80.0, mfu: float = 0.4, gpu: str = "H100"
) -> OnlineBudget:
    """Return the budget of an online job whose policy has `gpus` GPUs; `directory` needs only a config.json.

    Raises UserError for an unknown GPU, a model that cannot be sharded as the job says, or an engine of the user's own.
    """
    job = with_lora_sync(job, gpu=True, experts=bridge.decoder_config(directory).moe is not None)
    rollout = job.online_rollout
    recipe, room = registry.build(job), room_gib * GIB
    update = budget(job, directory, gpus, room_gib=room_gib, mfu=mfu, gpu=gpu, recipe=recipe, beside={})
    engine = _engine(job, rollout, directory, room)
    transport = resolve_transport(job, gpu=True)
    policy = _trained(update, gpus, "update", "logprobs" if recipe.needs_old_logprobs else None)
    # with LoRA, the policy without its adapters is the reference too
    own = sorted(role for role, model in recipe.frozen_models.items() if not needs_weights(model, job.model))
    phases = {**policy.phases, **dict.fromkeys(own, update.forward.total - policy.held)}
    roles = {"policy": replace(policy, phases=phases), **_frozen(job, rollout, directory, recipe, gpus)}
    trained = [update]
    if recipe.critic is not None:
        trained.append(budget(job, directory, gpus, room_gib=room_gib, gpu=gpu, recipe=recipe.critic, beside={}))
        roles["critic"] = _trained(trained[1], gpus, "update critic", "values")
    roles["rollout"] = engine.memory
    sent = update.trained if rollout.lora_sync == "adapter" else update.parameters
    shared = pools_of(job.compute.pools, {role: memory.workers for role, memory in roles.items()})
    pools = [_pool(pool, roles, engine, transport) for pool in shared]
    sync = sync_traffic(sent, job.train.precision, transport)
    host = max(_offloaded(rollout, pool, roles, engine) for pool in shared) + sum(of.host for of in trained) + sync.host
    copied, problems = sum(of.copied for of in trained), tuple(_problems(pools, engine, room, job))
    return OnlineBudget(pools, update, engine, transport, sync, host, copied, room, problems)


def _trained(planned: Budget, workers: int, update: str, forward: str | None) -> RoleMemory:
    """Return the memory of a role that trains, with the phase of its update and that of a forward pass alone."""
    held = planned.forward.weights + planned.forward.optimizer
    phases = {update: planned.memory.total - held}
    if forward:
        phases[forward] = planned.forward.total - held
    return RoleMemory(workers, held, phases)


def _frozen(job: Job, rollout: RolloutConfig, directory: Path, recipe: Recipe, gpus: int) -> dict[str, RoleMemory]:
    """Return the memory of the frozen models that have a role: reference, teacher, reward model."""
    memories = {
        role: frozen_memory(
            job, directory if model.path is None else config_directory(str(model.path)), gpus, "lm", None
        )
        for role, model in recipe.frozen_models.items()
        if needs_weights(model, job.model)
    }
    if reward := rollout.reward_model:
        length = 2 * job.data.seq_len
        memories["reward_model"] = frozen_memory(job, config_directory(reward.path), gpus, "scalar", length)
    return {role: RoleMemory(gpus, of.weights, {role: of.total - of.weights}) for role, of in memories.items()}


def _engine(job: Job, rollout: RolloutConfig, directory: Path, room: float) -> Engine:
    if rollout.engine not in ("vllm", "native"):
        raise UserError("ptf plan cannot count the memory of a rollout engine of your own; plan with vllm or native")
    model = bridge.build(directory)
    size = WIDTH[job.train.precision]
    weights = size * sum(p.numel() for p in model.parameters()) / rollout.tensor_parallel_size
    # bytes of a token; devices beyond the number of key-value heads repeat them
    each = size * model.config.cache_elements / min(rollout.tensor_parallel_size, model.config.kv_heads)
    if rollout.engine == "vllm":
        held = rollout.gpu_memory_utilization * room
        cache = max(0.0, held - weights)
        responses = rollout.replicas * cache / (each * job.data.seq_len)
        memory = RoleMemory(rollout.replicas * rollout.tensor_parallel_size, held, {"rollout": 0.0})
        return Engine(memory, weights, cache, responses)
    answered = min(BATCH, math.ceil(rollout.prompts_per_step / rollout.replicas) * rollout.group_size)
    contexts = math.ceil(answered / rollout.group_size)
    states = 0
    if (c := model.config.delta) is not None:  # what linear attention keeps: its states, and its convolution's inputs
        kept = c.value_heads * c.key_dim * c.value_dim
        kept += (c.conv - 1) * (2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim)
        # in fp32, of each context and of each response
        states = 4 * (len(model.config.layers) - model.config.attention_layers) * kept * (answered + contexts)
    tokens = contexts * (job.data.seq_len - rollout.max_new_tokens) + answered * rollout.max_new_tokens
    cache = each * tokens + states
    memory = RoleMemory(rollout.replicas, weights, {"rollout": cache})
    return Engine(memory, weights, cache, float(answered * rollout.replicas))


def _offloaded(rollout: RolloutConfig, pool: Pool, roles: Mapping[str, RoleMemory], engine: Engine) -> float:
    """Return the bytes of host memory per device for what the roles of a pool offload; 0 if the pool has one role, or
    offloads to disk.

    vLLM always discards its cache, and also its weights if a sync sends all of them.
    """
    if len(pool.roles) < 2 or pool.disk:
        return 0.0
    discards = rollout.engine == "vllm" and rollout.lora_sync == "merged"
    held = {role: roles[role].held for role in pool.roles} | {"rollout": 0.0 if discards else engine.weights}
    return sum(held[role] for role in pool.roles)


def _pool(pool: Pool, roles: Mapping[str, RoleMemory], engine: Engine, transport: str) -> PoolBudget:
    """Return the memory of a pool in each phase in which one of its roles works."""
    own = {role: memory for role, memory in roles.items() if role in pool.roles}
    phases = {
        phase: {role: memory.held + more} for role, memory in own.items() for phase, more in memory.phases.items()
    }
    # what a sync has in memory, together or one after the other
    streams, in_files = TRANSPORTS[transport].streams, TRANSPORTS[transport].in_files
    buckets = 2.0 * BUCKET_BYTES if streams or in_files else 0.0
    policy = {"policy": own["policy"].held + buckets} if "policy" in own else {}
    # the engine has no cache yet, and vLLM replaces its weights in place
    rollout = {"rollout": engine.weights + buckets} if "rollout" in own else {}
    if streams and policy and rollout:
        phases["sync policy and rollout"] = {**policy, **rollout}
    else:
        phases |= {f"sync {role}": of for of in (policy, rollout) for role in of}
    return PoolBudget(pool.name, len(pool.processes), phases)


def _problems(pools: Sequence[PoolBudget], engine: Engine, room: float, job: Job) -> Iterator[str]:
    """Yield why the job does not fit, with the keys that change it."""
    for pool in pools:
        for phase in pool.phases:
            if (total := pool.total(phase)) > room:
                yield (
                    f"pool {pool.name}, phase {phase}: {total / GIB:.1f} of {room / GIB:.1f} GiB; more GPUs "
                    f"(--workers) or {_advice(phase)}"
                )
    if engine.responses < 1:
        yield (
            f"rollout: the weights take {engine.weights / GIB:.1f} GiB, and no response of data.seq_len "
            f"({job.data.seq_len}) tokens fits beside them; raise rollout.gpu_memory_utilization or "
            "rollout.tensor_parallel_size"
        )


def _advice(phase: str) -> str:
    if phase.startswith("update"):
        return (
            "train.activation_checkpointing: block or offload, train.micro_batch_sequences: 1, "
            "train.optimizer: adamw_offload or adamw_8bit, compute.mesh.tensor_parallel_size or context_parallel_size"
        )
    if phase == "sync policy and rollout":
        return "another pool for rollout (rollout.transport: nccl)"
    return "a pool of its own for this role (compute.pools)"


def sync_traffic(parameters: int, precision: str, transport: str) -> SyncTraffic:
    """Return what a sync of this many weights moves on one machine, by a transport (`rollout.transport`).

    A sync gathers the tensors of a sharded policy and carries them to each engine, over the links that the table of the
    transports names, in the precision of the engine. For an adapter, give the number of its weights. The seconds are
    those of the slowest link, or of a digest where it is slower, if the parts of a transfer overlap, and otherwise
    their sum; a real transfer takes longer.
    """
    chosen, sent = TRANSPORTS[transport], parameters * WIDTH[precision]
    seconds = [times * sent / RATES[link] for link, times in chosen.link_crossings.items()]
    # an engine that reads only when everything is stored overlaps with nothing: then the times of both halves add
    return SyncTraffic(sent, 0 if chosen.streams else sent, max(seconds) if chosen.streams else sum(seconds))
