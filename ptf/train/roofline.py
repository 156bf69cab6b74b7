"""An upper bound of the MFU of a training step, operator by operator, from the sizes of a model alone.

A layer runs forward and backward on the meta device, and each operator takes at least the largest of: its FLOPs over
the share of the peak that matrix products reach, its bytes over the share of the bandwidth that copies reach, and the
launch of a kernel. Attention counts the pairs of its documents; what torch.compile makes one kernel counts its inputs
and outputs. The collectives of FSDP run beside the computation; only the time by which they exceed it counts.

Nothing else is counted: no gaps between kernels, no slow sorts, no waiting for data. A measured MFU is therefore lower.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ptf.compute.meter import PEAKS
from ptf.config import Job
from ptf.config.backends import BACKENDS
from ptf.errors import UserError
from ptf.model.attention import Attention
from ptf.model.chunked import CUDA_CHUNK_BYTES
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Block
from ptf.model.flops import Flops, pairs
from ptf.model.kernels.choice import Kernels
from ptf.model.layers import LayerFactory
from ptf.model.recompute import SAVED, Recompute
from ptf.model.rope import rotary
from ptf.train.budget import sequences_of_step
from ptf.train.trainer import built

MATRIX, MEMORY = 0.72, 0.85  # shares of the peak FLOP/s and of the bandwidth that are reached
KERNEL_S = 2e-6
FLEX_FORWARD, FLEX_BACKWARD = 0.5, 0.4  # shares of the peak that FlexAttention reaches over its kept pairs
LINK = 0.8  # share of a link's bandwidth that collectives reach
MEDIAN, SIGMA = 180, 1.03  # of the log-normal lengths of documents, in tokens
aten = torch.ops.aten
# what moves nothing, though it is no view by its schema
FREE = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten._unsafe_view.default}


class Gpu(NamedTuple):
    """The speeds of a GPU, from its data sheet."""

    flops: float  # dense bf16
    bandwidth: float  # of its memory, bytes per second
    link: float  # to the other GPUs, bytes per second in one direction


GPUS = {
    name: Gpu(PEAKS[name][0] * 1e12, bandwidth, link)
    for name, bandwidth, link in (
        ("H200", 4.8e12, 450e9),
        ("H100", 3.35e12, 450e9),
        ("A100", 2.0e12, 300e9),
        ("B200", 8.0e12, 900e9),
    )
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The bound of a step on one GPU."""

    mfu: float
    seconds: float
    operators: Mapping[str, float]  # name → seconds, the longest first
    exposed: float  # seconds of collectives that no computation hides, included in `seconds`


@dataclass
class Costs:
    """Seconds and FLOPs by operator on a GPU."""

    gpu: Gpu
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    flops: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, *, flops: float = 0.0, share: float = MATRIX, bytes_: float = 0.0) -> None:
        """Add an operator that runs once."""
        self.seconds[name] += max(flops / (self.gpu.flops * share), bytes_ / (self.gpu.bandwidth * MEMORY), KERNEL_S)
        self.flops[name] += flops

    def merge(self, other: "Costs", times: int = 1) -> None:
        """Add all operators of `other`, each of which runs `times` times."""
        for name, seconds in other.seconds.items():
            self.seconds[name] += times * seconds
            self.flops[name] += times * other.flops[name]

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())


class Timeline(TorchDispatchMode):
    """Adds up the costs of the operators that are dispatched on the meta device.

    `only_recomputed` counts what `selective` activation checkpointing computes again.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs, self.only_recomputed = costs, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not (function.is_view or function in FREE or (self.only_recomputed and function in SAVED)):
            name, moved = function.overloadpacket.__name__, _moved(args, kwargs) + _moved(out)
            name = "matrix products" if name in ("mm", "addmm", "bmm", "_grouped_mm") else name
            self.costs.add(name, flops=_flops(function, args, kwargs or {}, out), bytes_=moved)
        return out


def _moved(*values: Any) -> int:
    """Return the bytes of memory behind all tensors in these values, each counted once: those of its storage where it
    is expanded."""
    tensors = {id(t): t for t in tree_leaves(values) if isinstance(t, Tensor)}.values()
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _flops(function: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of a matrix product, 0 for other operators."""
    if function is aten._grouped_mm.default:
        # rows [n, k] times experts [e, k, m], or the gradient of the experts, [k, n] times [n, m]
        return 2.0 * out.numel() * args[0].shape[-1] / (len(out) if out.dim() == 3 else 1)
    count = flop_registry.get(function.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


class _Kernel(Function):
    """A function as one kernel, as under torch.compile: it reads its tensors and writes its output, forward and
    backward. Tensors in tuples have no gradients; arguments that are not tensors are constants of the kernel."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], timeline: Timeline, *args: Any) -> Tensor:
        with _disable_current_modes():
            out = function(*args)
        ctx.name, ctx.costs, ctx.args = f"compiled {function.__name__}", timeline.costs, args
        ctx.costs.add(ctx.name, bytes_=_moved(args, out))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        found = [arg.new_empty(arg.shape) if need else None for arg, need in zip(ctx.args, needs, strict=True)]
        ctx.costs.add(f"{ctx.name}, backward", bytes_=_moved(ctx.args, grads, found))
        return None, None, *found


class _Flex(Function):
    """FlexAttention over documents: the pairs that its mask keeps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kept: float, costs: Costs) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        ctx.product, ctx.costs = 2.0 * kept * q.shape[-2], costs  # of a dimension of keys or values
        flops = ctx.product * (q.shape[-1] + v.shape[-1])
        costs.add("attention", flops=flops, share=FLEX_FORWARD, bytes_=_moved(q, k, v, out))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        moved = 2 * _moved(*ctx.saved_tensors)
        # five products, of which one makes the scores again
        flops = ctx.product * (3 * q.shape[-1] + 2 * v.shape[-1])
        ctx.costs.add("attention, backward", flops=flops, share=FLEX_BACKWARD, bytes_=moved)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


def document_lengths(sequences: int, seq_len: int) -> list[int]:
    """Return the lengths of the documents that fill sequences of `seq_len` tokens, log-normal, the same each time."""
    rng, lengths = np.random.default_rng(0), []
    for _ in range(sequences):
        left = seq_len
        while left:
            length = min(left, max(1, round(float(rng.lognormal(math.log(MEDIAN), SIGMA)))))
            lengths.append(length)
            left -= length
    return lengths


def layer_costs(
    c: DecoderConfig,
    layer: int,
    factory: LayerFactory,
    gpu: Gpu,
    lengths: Sequence[int],
    *,
    sequences: int,
    recomputed: Recompute,
    compiled: bool,
    frozen: Callable[[str], bool],
) -> Costs:
    """Return the costs of a layer's forward and backward passes over sequences that documents of these lengths fill."""
    if c.layers[layer].delta:
        raise UserError("ptf plan --roofline does not count linear attention; ptf plan without it plans the memory")
    costs = Costs(gpu)
    timeline = Timeline(costs)
    seq_len = sum(lengths) // sequences
    if compiled:
        kernels = Kernels().compile(lambda function: partial(_Kernel.apply, function, timeline))
        factory = replace(factory, kernels=kernels)
    with torch.device("meta"):
        block = Block(c, layer, factory, f"layers.{layer}").to(torch.bfloat16)
        x = torch.empty(sequences, seq_len, c.dim, dtype=torch.bfloat16, requires_grad=True)
        real = torch.empty(sequences, seq_len, dtype=torch.bool)
        table = rotary(torch.arange(seq_len)[None].expand(sequences, seq_len), c.rotary_dim, c.layers[layer].rope)
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not frozen(f"layers.{layer}.{name}"))

    def attend(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = float(sum(pairs(n, layer.window) for n in lengths))
        return cast("Tensor", _Flex.apply(q, k, v, kept, costs))

    with timeline:
        y = block(x, table, attend, real)
        if recomputed == "block":
            block(x, table, attend, real)
        elif recomputed == "selective":
            timeline.only_recomputed = True
            block(x, table, lambda layer, q, k, v: q.new_empty(*q.shape[:-1], v.shape[-1]), real)
            timeline.only_recomputed = False
        y.backward(torch.empty_like(y))
    return costs


def head_costs(gpu: Gpu, positions: int, dim: int, vocab: int, chunk_bytes: int, trained: bool) -> Costs:
    """Return the costs of the loss head over so many trained positions."""
    costs = Costs(gpu)
    chunk = max(1, chunk_bytes // (4 * vocab))
    for first in range(0, positions, chunk):
        n = min(chunk, positions - first)
        product, logits, narrow = 2.0 * n * dim * vocab, 4.0 * n * vocab, 2.0 * n * vocab
        weight, hidden = 2.0 * dim * vocab, 2.0 * n * dim
        costs.add("head: logits", flops=product, bytes_=hidden + weight + logits)
        costs.add("head: softmax and loss", bytes_=4 * logits)  # log-softmax and exp, in place
        costs.add("head: gradient of the logits", bytes_=logits + narrow)
        costs.add("head: gradient of the input", flops=product, bytes_=narrow + weight + hidden)
        if trained:
            costs.add("head: gradient of the weight", flops=product, bytes_=narrow + hidden + 4 * weight)
    return costs


def roofline(job: Job, directory: Path, gpus: int, gpu: str) -> Roofline:
    """Return the bound of an SFT step of the job on `gpus` GPUs of a kind; `directory` needs only a config.json.

    Every position is trained. Raises UserError for what it does not count: other recipes and backends, components of
    the user's own, tensor and context parallelism, fp32, and GPUs whose speeds are not known.
    """
    raise_if_uncounted(job, gpu)
    speeds, of_rank = GPUS[gpu], sequences_of_step(job, gpus) // gpus
    sequences = min(job.train.micro_batch_sequences, of_rank)
    passes = math.ceil(of_rank / sequences)
    model = built(directory, job.model, "lm")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lengths, tokens = document_lengths(sequences, job.data.seq_len), sequences * job.data.seq_len
    step = Costs(speeds)
    c = model.config
    for kind, count in Counter(c.layers).items():
        one = layer_costs(
            c,
            c.layers.index(kind),
            model.factory,
            speeds,
            lengths,
            sequences=sequences,
            recomputed=job.train.activation_checkpointing,
            compiled=job.train.compile is not False,
            frozen=frozen.__contains__,
        )
        step.merge(one, count)
    head = cast("Tensor", model.head.weight)  # which may be the embedding's, and have its name alone
    step.merge(head_costs(speeds, tokens, c.dim, c.padded, CUDA_CHUNK_BYTES, head.requires_grad))
    step.add("embedding", bytes_=4.0 * tokens * c.dim)
    if "embed.weight" not in frozen:
        step.add("embedding, backward", bytes_=4.0 * tokens * c.dim + 2.0 * c.padded * c.dim)
    # FSDP, also over one rank: cast and copy weights for each forward and backward pass, gradients into fp32 shards
    step.add("sharding: copies", bytes_=20.0 * parameters + 6.0 * trained + 12.0 * trained / gpus)
    # its collectives: weights are gathered twice in bf16, gradients scattered in fp32
    sent = (2 * 2 * parameters + 4 * trained) * (gpus - 1) / gpus
    exposed = passes * max(0.0, sent / (speeds.link * LINK) - step.total)
    whole = Costs(speeds)
    whole.merge(step, passes)
    shards = trained / gpus  # of one rank, in fp32
    whole.add("clipping", bytes_=12 * shards)
    whole.add("AdamW", bytes_=28 * shards)
    if job.train.optimizer == "adamw_8bit":  # both moments from 8 bits to fp32 and back
        whole.add("conversion of moments", bytes_=2 * 2 * (1 + 4) * shards)
    seconds = whole.total + exposed
    work = passes * Flops.of(model).step(lengths, tokens)
    operators = dict(sorted(whole.seconds.items(), key=lambda item: -item[1]))
    return Roofline(work / (seconds * speeds.flops), seconds, operators, exposed)


def raise_if_uncounted(job: Job, gpu: str) -> None:
    """Raise UserError for a job or a GPU that the roofline does not count."""
    refused = {
        f"the GPU {gpu}: it has {', '.join(GPUS)}": gpu not in GPUS,
        "recipes other than sft": job.recipe != "sft",
        f"model.backend: {job.model.backend}": not BACKENDS[job.model.backend].planned,
        "components of your own (model.replace, model.head)": bool(job.model.replace or job.model.head),
        "compute.mesh.tensor_parallel_size": job.compute.mesh.tensor_parallel_size > 1,
        "compute.mesh.context_parallel_size": job.compute.mesh.context_parallel_size > 1,
        "train.optimizer: adamw_offload": job.train.optimizer == "adamw_offload",
        "train.activation_checkpointing: offload": job.train.activation_checkpointing == "offload",
        "model.quantization": job.model.quantization is not None,
        "train.precision: fp32": job.train.precision == "fp32",
    }
    if found := [what for what, applies in refused.items() if applies]:
        raise UserError(f"ptf plan --roofline does not count {found[0]}")
