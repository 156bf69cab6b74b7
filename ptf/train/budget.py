"""The memory on each GPU, the FLOPs of a step and its time, computed before a job is started.

The model is sharded exactly as in the run, but on the meta device and under a fake process group of as many ranks, so
the counts are those of the real run and take seconds for hundreds of GPUs. Activations come from what autograd saves
(ptf.model.activation_memory), with the parts compiled that `train.compile` compiles on a GPU.

Where the numbers depend on the data, they are upper bounds: every sequence is one document of `seq_len` tokens, all of
them trained; experts get equal shares.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ptf.compute.meter import PEAKS
from ptf.config import Job
from ptf.config.backends import BACKENDS
from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError, first_line
from ptf.meshes import Meshes
from ptf.model import bridge, model_files
from ptf.model.activation_memory import ActivationBytes, activation_bytes
from ptf.model.chunked import CUDA_CHUNK_BYTES
from ptf.model.context_parallel import raise_if_not_divided
from ptf.model.flops import Flops
from ptf.model.hub import is_id
from ptf.model.model import Model
from ptf.model.quantised_weights import quantised_weights, weight_shapes
from ptf.model.recompute import Recompute
from ptf.model.sharding import parallelize
from ptf.recipes import registry
from ptf.recipes.protocol import FrozenModelSpec, Recipe
from ptf.storage.hub import at_revision, refusal, unreachable
from ptf.train.components import layer_factory_of
from ptf.train.model_source import needs_weights
from ptf.train.optimizer_8bit import moment_bytes
from ptf.train.optimizer_offload import BUCKET_BYTES
from ptf.train.step_metrics import forward_flops
from ptf.train.trainable import frozen_dtype
from ptf.train.trainer import built

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU at the peak of a step."""

    weights: float  # shards: trained weights in fp32, the others in `frozen_dtype`
    gradients: float  # shards of the gradients of trained weights, in fp32
    optimizer: float  # AdamW's two averages
    # gathered parameters in the dtype of the computation: at most two blocks (one is prefetched), the gradients of one,
    # and the root module (embedding, last norm, head)
    gathered: float
    activations: float
    logits: float  # a chunk of them, the gradient of the head, and hidden states of the last layer

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.logits

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(self.__slots__, key=lambda name: getattr(self, name))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a job needs: memory, FLOPs, tokens and seconds of a step."""

    model: str
    mesh: MeshSizes
    parameters: int
    trained: int
    memory: Memory  # at the fullest moment
    forward: Memory  # in a forward pass alone, of log-probs or values
    micro_batch_sequences: int
    flops: float  # of a global step
    tokens: int  # of a global step
    seconds: float
    room: float  # bytes
    # bytes of host memory for each worker: the optimizer's averages and the inputs of layers that are offloaded
    host: float = 0.0
    copied: float = 0.0  # bytes of host memory for each worker while it writes a checkpoint

    @property
    def fits(self) -> bool:
        """Whether the memory fits the GPU."""
        return self.memory.total <= self.room


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The numbers of elements of a sharded model on one rank."""

    here: int
    trained: int
    block: int  # the largest, whole over the data-parallel ranks
    block_trained: int
    root: int  # embedding, last norm and head
    root_trained: int
    head: int  # vocabulary × hidden size
    largest: int  # the largest parameter that trains
    moments: float  # bytes of AdamW's two averages
    # weights in four bits, which are not among the elements above:
    quantised: int = 0  # bytes on this rank
    block_quantised: int = 0  # bytes of the block with most, whole
    dequantised: int = 0  # elements of the largest of them, which a product needs


@dataclass(frozen=True, slots=True)
class _Run:
    """The settings of training that memory depends on."""

    recomputed: Recompute
    sequences: int
    seq_len: int
    element: int  # bytes
    frozen: int  # bytes of an element that does not train
    frozen_models: float = 0.0  # weights of the frozen models, as a multiple of this model's
    frozen_model_gathered: int = 0  # gathered elements of the largest of them: two blocks, embedding and head
    softcapped: bool = False  # whether the head keeps the slope of every logit of a chunk
    offloaded: bool = False  # whether the optimizer's averages are in host memory but for a bucket
    eight_bit: bool = False  # whether the optimizer's averages are in 8 bits but for a bucket
    contexts: int = 1  # ranks that divide the sequences
    shards: int = 1  # ranks that the model is sharded over: more than one gather into buffers that they free late

    def memory(self, sizes: _Sizes, layers: list[ActivationBytes], dim: int) -> Memory:
        """Return the memory at the fullest moment of a step."""
        return max(self._moments(sizes, layers, dim), key=lambda memory: memory.total)

    def _moments(self, sizes: _Sizes, layers: list[ActivationBytes], dim: int) -> Iterator[Memory]:
        """Yield the memory at the moments that may be the fullest."""
        sharded, head = self.shards > 1, sizes.head if sizes.root_trained else 0
        saved, before_last = self._saved(layers), self._saved(layers[:-1])
        partly = {"none": 0.0, "selective": max(of.everything - of.products for of in layers)}
        again = partly.get(self.recomputed, max(of.everything for of in layers))  # what a backward pass computes again

        def at(activations: float, blocks: int, elements: int = 0, fp32: int = 0, logits: float = 0.0) -> Memory:
            """Return it with so many layers, embedding and head gathered, and with other elements in the dtype of the
            computation and in fp32; `activations` are bytes per token."""
            gathered = self.element * (blocks * sizes.block + sizes.root + elements) + blocks * sizes.block_quantised
            return self._held(sizes, gathered + 4.0 * fp32, self._tokens / self.contexts * activations, logits)

        # forward, before the last layer: its weights are copied out of the buffer that they were gathered into, and
        # the buffer of the layer before is not yet free; then in its experts
        yield at(before_last, 3 if sharded else 1)
        yield at(saved + max(layer.in_forward for layer in layers), 2 if sharded else 1, sizes.dequantised)
        # the loss of a chunk of logits: in fp32, with the gradient that a GEMM of 16 bits reads, and with the slopes;
        # FSDP frees the last layer that it gathered when it gathers the next
        logits = self._chunk(sizes, dim) * (1 + (self.element == 2) / 2 + self.softcapped)
        # hidden states of all ranks: the trained ones and their gradients, and those of which they are taken; of this
        # rank: what the last layer put out, and the norm of it
        copies = 2 + (self.contexts > 1) + 2 / self.contexts
        logits += copies * self._tokens * dim * self.element
        # the gradient of this rank's rows of the head, in fp32 and as it is given back
        yield at(saved, int(sharded), logits=logits + (4 + self.element) * head / self.contexts)
        # backward of the last layer: its gradients are computed, the next layer is gathered, and the head's gradient
        # waits for the embedding's
        ahead = 2 if sharded and len(layers) > 1 else 1
        yield at(saved + again, ahead, sizes.block_trained + head + sizes.dequantised)
        # backward of an earlier layer, while the gradients of the layer after it are reduced, in fp32: an MLP's begins
        # with the most that it holds beside what is saved, and ends with the gradients of its weights
        ahead = 2 if sharded and len(layers) > 2 else 1
        for gradients, passing in ((0, max(layer.in_backward for layer in layers)), (sizes.block_trained, 0.0)):
            elements = gradients + head + sizes.dequantised
            yield at(before_last + again + passing, ahead, elements, fp32=sizes.block_trained)
        # the gradients of the last layer are reduced: its weights are freed; then those of embedding and head
        yield at(before_last, 1, sizes.block_trained + head, fp32=sizes.block_trained)
        yield self._held(sizes, (self.element + 4.0) * sizes.root_trained, 0.0, 0.0)
        alone = self._held(sizes, 0.0, 0.0, 0.0)
        if self.offloaded:  # to save or to resume, when nothing is gathered
            yield replace(alone, optimizer=sizes.moments)
        if self.eight_bit:  # in the optimizer's step, which has a bucket of them in fp32 beside those in 8 bits
            yield replace(alone, optimizer=sizes.moments + self._bucket(sizes))

    def forward(self, sizes: _Sizes, layers: list[ActivationBytes], dim: int) -> Memory:
        """Return the memory of a forward pass alone, between steps, when there are no gradients."""
        gathered = self.element * (2 * sizes.block + sizes.root + sizes.dequantised) + 2.0 * sizes.block_quantised
        here = self._tokens / self.contexts
        activations = here * max(layer.everything for layer in layers)  # of one layer; its parts are freed
        logits = self._chunk(sizes, dim) + (1 + (self.contexts > 1)) * self._tokens * dim * self.element
        optimizer = 0.0 if self.offloaded else sizes.moments
        return replace(self._held(sizes, gathered, activations, logits), gradients=0.0, optimizer=optimizer)

    def host(self, sizes: _Sizes, layers: list[ActivationBytes]) -> float:
        """Return the bytes of host memory that offloading takes."""
        inputs = sum(layer.input for layer in layers) if self.recomputed == "offload" else 0.0
        return sizes.moments * self.offloaded + self._tokens / self.contexts * inputs

    def _held(self, sizes: _Sizes, gathered: float, activations: float, logits: float) -> Memory:
        """Return a moment's memory: what is held all the time, and these parts."""
        return Memory(
            4.0 * sizes.trained
            + self.frozen * float(sizes.here - sizes.trained)
            + sizes.quantised
            + self.element * sizes.here * self.frozen_models,
            4.0 * sizes.trained,
            self._bucket(sizes) if self.offloaded else sizes.moments,
            gathered + self.element * self.frozen_model_gathered,
            activations,
            logits,
        )

    @staticmethod
    def _bucket(sizes: _Sizes) -> float:
        """Return the most bytes of fp32 averages that the optimizer's step has at once, if it goes by bucket."""
        return min(8.0 * sizes.trained, max(BUCKET_BYTES, 8.0 * sizes.largest))

    def _saved(self, layers: list[ActivationBytes]) -> float:
        """Return the bytes per token on the device that these layers keep for the backward pass."""
        if self.recomputed == "offload":  # of the layer before: it is copied while a layer computes with its own
            return max((layer.input for layer in layers), default=0.0)
        return sum(layer.of(self.recomputed) for layer in layers)

    def _chunk(self, sizes: _Sizes, dim: int) -> int:
        """Return the bytes of a chunk of fp32 logits, or of all of them; a head of the user's own counts as a chunk."""
        logits = 4 * self._tokens * sizes.head // (dim * self.contexts)
        return min(CUDA_CHUNK_BYTES, logits) if sizes.head else CUDA_CHUNK_BYTES

    @property
    def _tokens(self) -> int:
        return self.sequences * self.seq_len


def budget(
    job: Job,
    directory: Path,
    gpus: int,
    *,
    room_gib: float = 80.0,
    mfu: float = 0.4,
    gpu: str = "H100",
    recipe: Recipe | None = None,
    beside: Mapping[str, FrozenModelSpec] | None = None,
) -> Budget:
    """Return the budget of an offline job on `gpus` GPUs; `directory` needs only a config.json.

    `recipe` and `beside`, the frozen models on the same GPUs, are by default the job's; an online job has a budget for
    each role (`ptf.rl.online_budget`). Raises UserError for an unknown GPU, or a model that cannot be sharded so.
    """
    _raise_if_unknown(job, gpu)
    ranks, precision = job.compute.mesh.sizes(gpus), job.train.precision
    in_step = sequences_of_step(job, ranks.data)
    with fake_meshes(ranks) as meshes:
        recipe = recipe or registry.build(job)
        model = built(directory, job.model, recipe.head)
        raise_if_not_divided(model.config, ranks)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        counts = sum(shape.numel() for shape in weight_shapes(model).values()), trained
        flops = Flops.of(model)
        by_role = beside if beside is not None else {} if recipe.precompute else recipe.frozen_models
        others = [_frozen_model(spec, role, job, directory, recipe.head, meshes) for role, spec in by_role.items()]
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        layers = _layers(model, dtype, ranks, compiled=job.train.compile is not False)
        parallelize(model, meshes, precision)
        sizes = _sizes(model, eight_bit=job.train.optimizer == "adamw_8bit")
    loaded = [
        other for spec, (other, _) in zip(by_role.values(), others, strict=True) if needs_weights(spec, job.model)
    ]
    sequences = min(job.train.micro_batch_sequences, -(-in_step // ranks.data))
    run = _Run(
        job.train.activation_checkpointing,
        sequences,
        job.data.seq_len,
        dtype.itemsize,
        frozen_dtype(directory, precision, exported=True).itemsize,
        sum(other.here for other in loaded) / sizes.here,
        max((2 * other.block + other.root for other in loaded), default=0),
        softcapped=model.config.softcap is not None,
        offloaded=job.train.optimizer == "adamw_offload",
        eight_bit=job.train.optimizer == "adamw_8bit",
        shards=ranks.shard * ranks.context,
        contexts=ranks.context,
    )
    in_step *= recipe.update_epochs
    tokens, lengths = in_step * job.data.seq_len, [job.data.seq_len] * in_step
    work = flops.step(lengths, tokens) + sum(forward.step(lengths, tokens) for _, forward in others)
    dim, room = model.config.dim, room_gib * GIB
    memory, forward_alone = run.memory(sizes, layers, dim), run.forward(sizes, layers, dim)
    seconds = work / (gpus * PEAKS[gpu][precision == "fp32"] * 1e12 * mfu)
    copied = 4.0 * sizes.trained + sizes.moments
    cost = memory, forward_alone, sequences, work, tokens, seconds, room, run.host(sizes, layers), copied
    return Budget(str(directory), ranks, *counts, *cost)


def _raise_if_unknown(job: Job, gpu: str) -> None:
    if gpu not in PEAKS:
        raise UserError(f"ptf plan has no speed for the GPU {gpu}; it has {', '.join(PEAKS)}")
    if not BACKENDS[job.model.backend].planned:
        raise UserError(f"ptf plan counts ptf's own decoder only; model.backend is {job.model.backend}")


def sequences_of_step(job: Job, ranks: int) -> int:
    """Return the sequences of a global step; online at most, because responses are shorter, and those to one prompt
    share it. Raises UserError unless each data-parallel rank trains as many."""
    if job.rollout:
        return job.rollout.prompts_per_step * job.rollout.group_size
    if job.train.global_batch_sequences % ranks:
        raise UserError(
            f"train.global_batch_sequences ({job.train.global_batch_sequences}) must be a multiple of the {ranks} "
            "data-parallel ranks: each trains at least one sequence"
        )
    return job.train.global_batch_sequences


def frozen_memory(
    job: Job, directory: Path, workers: int, head: Literal["lm", "scalar"] = "lm", length: int | None = None
) -> Memory:
    """Return the memory of a role whose model is not trained, while it computes; `length` is that of a
    sequence, as far as the model reads it (default: data.seq_len).

    Raises UserError for a model that cannot be sharded so.
    """
    precision = job.train.precision
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    ranks = job.compute.mesh.sizes(workers)
    with fake_meshes(ranks) as meshes:
        model = bridge.build(directory, head=head)
        model.requires_grad_(False)
        layers = _layers(model, dtype, ranks, compiled=job.train.compile is not False)
        parallelize(model, meshes, precision)
        sizes = _sizes(model)
    length = min(length, model.config.max_positions) if length else job.data.seq_len
    held = frozen_dtype(directory, precision, exported=False).itemsize
    run = _Run("none", job.train.micro_batch_sequences, length, dtype.itemsize, held, contexts=ranks.context)
    return run.forward(sizes, layers, model.config.dim)


def _frozen_model(
    spec: FrozenModelSpec, role: str, job: Job, directory: Path, head: Literal["lm", "scalar"], meshes: Meshes
) -> tuple[_Sizes, Flops]:
    if spec.same_architecture:
        model = bridge.build(directory, head=head, factory=layer_factory_of(job.model))
    else:
        try:
            model = bridge.build(config_directory(str(spec.path)))
        except UserError as error:
            raise UserError(f"{role}: {str(error).removeprefix('model.path: ')}") from None
    flops = forward_flops(model)
    return _sizes(parallelize(model, meshes, job.train.precision)), flops


@contextlib.contextmanager
def fake_meshes(sizes: MeshSizes, device: str = "cpu") -> Iterator[Meshes]:
    """Build meshes of ranks that do not exist, as the first rank sees it, which holds the most.

    Raises UserError inside another process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("ptf plan must run in a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=sizes.ranks)
    try:
        yield Meshes.of(device, sizes)
    finally:
        dist.destroy_process_group()


def config_directory(path: str) -> Path:
    """Return a directory with the config.json of a model; of a Hugging Face id, nothing else is downloaded.

    Raises UserError if there is none.
    """
    if "://" in path or Path(path).is_dir() or not is_id(path):
        return model_files.locate(path, verify_up_to=None)
    from huggingface_hub import hf_hub_download

    id, revision = at_revision(path)
    offline = unreachable()  # then its client would try for half a minute
    try:
        return Path(hf_hub_download(id, "config.json", revision=revision, local_files_only=bool(offline))).parent
    except Exception as error:  # the hub raises a dozen kinds; each means that there is no config
        why = offline or refusal(error, "model", id, revision) or first_line(error)
        raise UserError(
            f"model.path: {path} is no local directory, and its config.json cannot be downloaded from the hub: {why}\n"
            "A plan needs only that file: put it into a directory and give that with --set model.path=DIRECTORY"
        ) from error


def _layers(model: Model, dtype: torch.dtype, ranks: MeshSizes, *, compiled: bool) -> list[ActivationBytes]:
    """Return the activation memory of every layer; each kind of layer is measured once."""
    by_kind: dict[object, ActivationBytes] = {}
    c = model.config
    measured = []
    for i, block in enumerate(model.layers):
        kind = (c.layers[i], tuple((n, p.requires_grad, p.shape) for n, p in block.named_parameters()))
        if kind not in by_kind:
            by_kind[kind] = activation_bytes(
                c, i, model.factory, dtype, ranks.tensor, block, contexts=ranks.context, compiled=compiled
            )
        measured.append(by_kind[kind])
    return measured


def _sizes(model: Model, *, eight_bit: bool = False) -> _Sizes:
    def here(p: torch.Tensor) -> int:
        return (p.to_local() if isinstance(p, DTensor) else p).numel()

    def gathered(parameters: Iterable[nn.Parameter], floating: bool = True, trained: bool = False) -> int:
        kinds = [p for p in parameters if p.is_floating_point() == floating and (p.requires_grad or not trained)]
        return sum(map(_of_group, kinds))

    blocks = [list(block.parameters()) for block in model.layers]
    inside = {id(p) for block in blocks for p in block}
    root = [p for p in model.parameters() if id(p) not in inside]
    trained = [p for p in model.parameters() if p.requires_grad]
    return _Sizes(
        sum(here(p) for p in model.parameters() if p.is_floating_point()),
        sum(map(here, trained)),
        max(map(gathered, blocks)),
        max(gathered(block, trained=True) for block in blocks),
        gathered(root),
        gathered(root, trained=True),
        _of_group(getattr(model.head, "_parameters", {}).get("weight")),
        max(map(here, trained), default=0),
        sum(map(moment_bytes, trained)) if eight_bit else 8.0 * sum(map(here, trained)),
        sum(here(p) for p in model.parameters() if not p.is_floating_point()),
        max(gathered(block, floating=False) for block in blocks),
        max((weight.shape.numel() for weight in quantised_weights(model).values()), default=0),
    )


def _of_group(p: torch.Tensor | None) -> int:
    """Return the elements of a parameter that one rank of a tensor group has after FSDP gathered it."""
    if p is None:
        return 0
    if not isinstance(p, DTensor) or "tensor" not in (p.device_mesh.mesh_dim_names or ()):
        return p.numel()
    dim = (p.device_mesh.mesh_dim_names or ()).index("tensor")
    return p.numel() // p.device_mesh.size(dim) if p.placements[dim].is_shard() else p.numel()
