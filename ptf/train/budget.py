"""What a job needs before it is started: memory on each GPU, FLOPs of a step, and its time.

The one idea: the model is sharded exactly as it would be, on the meta device and under a process group of as many ranks that only pretends, so
the counts are those of the real plan and take seconds for hundreds of GPUs. Activations come from what autograd saves (ptf.model.kept).

Upper bounds where a run decides: every row is one document of `seq_len` tokens, all of them trained; experts get equal shares.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ptf.compute.meter import PEAKS
from ptf.compute.world import make_mesh
from ptf.config import Job
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.chunked import CHUNK_BYTES
from ptf.model.decoder import Decoder
from ptf.model.flops import Flops
from ptf.model.kept import Kept, kept
from ptf.model.plan import parallelize, refuse_mesh
from ptf.model.recompute import Recompute
from ptf.recipes import registry
from ptf.recipes.protocol import Companion
from ptf.train.companions import forward_flops, needs_weights
from ptf.train.parts import parts_of
from ptf.train.trainable import freeze

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU at the height of a step."""

    weights: float  # fp32 shards
    gradients: float  # fp32 shards, of what trains
    optimizer: float  # AdamW's two averages
    gathered: float  # whole blocks in the type of the computation: two while they are prefetched, one's gradients, and the root's
    activations: float
    logits: float  # a chunk of them, and the gradient of the head

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.logits

    @property
    def largest(self) -> str:
        return max(self.__slots__, key=lambda name: getattr(self, name))


@dataclass(frozen=True, slots=True)
class Budget:
    model: str
    gpus: int
    mesh: Mapping[str, int]
    parameters: int
    trained: int
    memory: Memory
    micro_rows: int
    flops: float  # of a global step
    tokens: int  # of a global step
    seconds: float
    room: float  # bytes
    advice: tuple[tuple[str, float], ...]  # a change, and the total that it would bring

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Elements of a sharded model on one rank."""

    here: int
    trained: int
    block: int  # the largest, whole over the data-parallel ranks
    block_trained: int
    root: int  # embedding, last norm and head
    root_trained: int
    head: int  # rows × width


@dataclass(frozen=True, slots=True)
class _Run:
    """How it is trained, as far as memory depends on it."""

    recomputed: Recompute
    rows: int
    width: int
    element: int  # bytes
    beside: float = 0.0  # weights of the frozen models, as a multiple of this one's
    heard: int = 0  # elements of the largest of them that are whole at a time: two blocks, embedding and head

    def memory(self, sizes: _Sizes, layers: list[Kept], dim: int) -> Memory:
        tokens = self.rows * self.width
        each = [layer.of(self.recomputed) for layer in layers]
        again = 0.0 if self.recomputed == "none" else max(layer.everything for layer in layers)  # one layer at a time
        gathered = self.element * (2 * sizes.block + sizes.root + sizes.root_trained + self.heard) + (self.element + 4) * sizes.block_trained
        logits = CHUNK_BYTES * (1 + (self.element == 2) / 2) + 2 * tokens * dim * self.element
        head = (4 + self.element) * sizes.head if sizes.root_trained else 0
        return Memory(4.0 * sizes.here * (1 + self.beside), 4.0 * sizes.trained, 8.0 * sizes.trained, gathered, tokens * (sum(each) + again), logits + head)


def budget(job: Job, directory: Path, gpus: int, *, room_gib: float = 80.0, mfu: float = 0.4, gpu: str = "H100") -> Budget:
    """Of an offline job over `gpus`, of a directory with a config.json. Raises UserError for what cannot be sharded so, or an unknown GPU."""
    if gpu not in PEAKS:
        raise UserError(f"ptf plan knows the speed of {', '.join(PEAKS)}, not of {gpu}")
    if job.model.backend == "hf":
        raise UserError("ptf plan counts ptf's own decoder; model.backend is hf")
    tensor, precision = job.compute.mesh.tensor, job.train.precision
    data = gpus // tensor
    if job.train.rows % data:
        raise UserError(f"train.rows ({job.train.rows}) must be a multiple of the {data} data-parallel ranks: each trains one row at least")
    with pretended(gpus, job.compute.mesh.replicate, tensor) as mesh:
        recipe = registry.build(job)
        model, family = bridge.build(directory, head=recipe.head, parts=parts_of(job.model, adapted=True))
        refuse_mesh(model.config, mesh)
        freeze(model, family, job.model.train)
        whole = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)
        flops = Flops.of(model)
        wanted = {} if getattr(recipe, "precomputed", False) else recipe.companions
        others = [_companion(one, role, model, mesh, precision) for role, one in wanted.items()]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        layers = _layers(model, dtype, tensor)
        parallelize(model, mesh, precision)
        sizes = _sizes(model)
    rows = min(job.train.micro_rows, job.train.rows // data)
    own = [other or sizes for one, (other, _) in zip(wanted.values(), others, strict=True) if needs_weights(one, job.model)]
    beside, heard = sum(other.here for other in own) / sizes.here, max((2 * other.block + other.root for other in own), default=0)
    run = _Run(job.train.checkpointing, rows, job.data.seq_len, dtype.itemsize, beside, heard)
    tokens, lengths = job.train.rows * job.data.seq_len, [job.data.seq_len] * job.train.rows
    work = flops.step(lengths, tokens) + sum(forward.step(lengths, tokens) for _, forward in others)
    memory, room = run.memory(sizes, layers, model.config.dim), room_gib * GIB
    peak = PEAKS[gpu][precision == "fp32"] * 1e12
    advice = () if memory.total <= room else tuple(_advice(run, sizes, layers, model.config.dim, gpus, room))
    replicate = job.compute.mesh.replicate
    shape = {"replicate": replicate, "shard": data // replicate, "tensor": tensor}
    return Budget(str(directory), gpus, shape, *whole, memory, rows, work, tokens, work / (gpus * peak * mfu), room, advice)


def _companion(one: Companion, role: str, model: Decoder, mesh: DeviceMesh, precision: str) -> tuple[_Sizes | None, Flops]:
    """Its sizes, None where they are the model's; and the FLOPs of its forward pass."""
    if one.alike:
        return None, forward_flops(model)
    try:
        other, _ = bridge.build(described(str(one.path), one.revision))
    except UserError as error:
        raise UserError(f"{role}: {str(error).removeprefix('model.path: ')}") from None
    found = forward_flops(other)
    parallelize(other, mesh, precision)  # type: ignore[arg-type]
    return _sizes(other), found


@contextlib.contextmanager
def pretended(gpus: int, replicate: int, tensor: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks that do not exist, seen from the first, which holds the most. Raises UserError inside another process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("ptf plan needs a process that is in no process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    try:
        yield make_mesh("cpu", gpus, replicate, tensor)
    finally:
        dist.destroy_process_group()


def described(path: str, revision: str | None) -> Path:
    """A directory with the config.json of a model; of a Hugging Face id nothing else is fetched. Raises UserError if there is none."""
    if "://" in path or Path(path).is_dir() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        return bridge.locate(path, revision, verify_up_to=None)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, "config.json", revision=revision)).parent
    except Exception as error:  # the hub raises a dozen kinds; each means that the config is not to be had
        why = str(error).strip().split("\n")[0]
        raise UserError(
            f"model.path: {path} is no directory here, and its config.json cannot be had from the hub: {why}\n"
            "a plan needs nothing else of it: put it into a directory and give that with --set model.path=DIRECTORY"
        ) from error


def _layers(model: Decoder, dtype: torch.dtype, tensor: int) -> list[Kept]:
    """Of every layer; each kind is measured once."""
    found: dict[object, Kept] = {}
    c = model.config
    out = []
    for i, block in enumerate(model.layers):
        kind = (c.kinds[i], tuple((n, p.requires_grad, p.shape) for n, p in block.named_parameters()))
        if kind not in found:
            found[kind] = kept(c, i, model.parts, dtype, tensor, block)
        out.append(found[kind])
    return out


def _sizes(model: Decoder) -> _Sizes:
    here = lambda p: (p.to_local() if isinstance(p, DTensor) else p).numel()  # noqa: E731

    def whole(module: nn.Module, trained: bool) -> int:
        return sum(_of_group(p) for p in module.parameters() if p.requires_grad or not trained)

    inside = {id(p) for block in model.layers for p in block.parameters()}
    root = [p for p in model.parameters() if id(p) not in inside]
    every = list(model.parameters())
    return _Sizes(
        sum(map(here, every)), sum(here(p) for p in every if p.requires_grad),
        max(whole(b, False) for b in model.layers), max(whole(b, True) for b in model.layers),
        sum(map(_of_group, root)), sum(_of_group(p) for p in root if p.requires_grad), _of_group(getattr(model.head, "_parameters", {}).get("weight")),
    )  # fmt: skip


def _of_group(p: torch.Tensor | None) -> int:
    """Elements of a parameter that one rank of a tensor group has when FSDP has gathered it."""
    if p is None:
        return 0
    if not isinstance(p, DTensor) or "tensor" not in (p.device_mesh.mesh_dim_names or ()):
        return p.numel()
    at = (p.device_mesh.mesh_dim_names or ()).index("tensor")
    return p.numel() // p.device_mesh.size(at) if p.placements[at].is_shard() else p.numel()


def _advice(run: _Run, sizes: _Sizes, layers: list[Kept], dim: int, gpus: int, room: float) -> Iterator[tuple[str, float]]:
    """Changes, each on top of those before it, in the order of what they cost, until one suffices; then those that change what is trained."""
    names: dict[str, str] = {}
    modes: tuple[Recompute, ...] = ("none", "selective", "block")
    changes = [("train.checkpointing", how, replace(run, recomputed=how), 1) for how in modes[modes.index(run.recomputed) + 1 :]]
    least = replace(run, recomputed="block", rows=1)
    if run.rows > 1:
        changes.append(("train.micro_rows", "1", least, 1))
    changes += [("GPUs", str(gpus * more), least, more) for more in (2, 4, 8, 16, 32, 64)]
    total = 0.0
    for key, value, changed, more in changes:
        names[key] = value
        total = changed.memory(replace(sizes, here=sizes.here // more, trained=sizes.trained // more), layers, dim).total
        yield ", ".join(f"{k}: {v}" for k, v in names.items()), total
        if total <= room:
            return
    yield "and compute.mesh.tensor, which cuts gathered blocks and activations, or model.lora, under which frozen weights have no gradients", total
