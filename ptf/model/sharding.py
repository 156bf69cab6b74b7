"""Sharding from outside: the model files are written for one device, and this file distributes them over many.

How tensor parallelism shards each parameter is a table over unified names; data parallelism (FSDP2, HSDP) needs none,
because it shards every parameter alike.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ptf.errors import UserError
from ptf.model.attention import Attention
from ptf.model.decoder import Decoder
from ptf.model.fused import use
from ptf.model.latent_attention import LatentAttention
from ptf.model.layers import MLP, RMSNorm, gated, normalised
from ptf.model.model import Model
from ptf.model.moe import Experts, clamped
from ptf.model.recompute import Recompute, recompute
from ptf.model.rope import Table, rotate
from ptf.model.tensor_parallel import (
    ParallelStyle,
    ParamSharding,
    cut,
    embed,
    mix,
    normalise_and_gather,
    normalise_width,
    own_experts,
)

NO_KERNELS: Mapping[str, str] = MappingProxyType({})
SHARD_DIM0, SHARD_DIM1, PARTIAL_GRADIENT = ParamSharding(0), ParamSharding(1), ParamSharding(partial=True)
# the output is sharded: a matrix [out, in] is cut by rows
COLWISE = ParallelStyle({"weight": SHARD_DIM0, "bias": SHARD_DIM0, "lora_a": PARTIAL_GRADIENT, "lora_b": SHARD_DIM0})
# the input is sharded; the output is a part of a sum
ROWWISE = ParallelStyle(
    {
        "weight": SHARD_DIM1,
        "bias": ParamSharding(partial=True, once=True),
        "lora_a": SHARD_DIM1,
        "lora_b": PARTIAL_GRADIENT,
    }
)
SEQUENCE = ParallelStyle(
    {"weight": PARTIAL_GRADIENT}
)  # a norm is whole on each rank, over its part of the sequence or its heads
# whole, over all tokens; its gradient comes only from the experts or the heads of this rank
ROUTER = ParallelStyle({w: PARTIAL_GRADIENT for w in ("weight", "bias", "lora_a", "lora_b")})
EXPERT = ParallelStyle(
    {f"{p}_{w}": SHARD_DIM0 for p in ("gate", "up", "down") for w in ("proj", "bias", "proj_lora_a", "proj_lora_b")},
    forward=own_experts,
)
# every rank computes linear attention whole, and the first rank's output counts
FIRST_RANK = ParallelStyle(
    {w: ParamSharding(partial=True, once=True) for w in ("weight", "lora_b")} | {"lora_a": PARTIAL_GRADIENT}
)
WHOLE = ParallelStyle()

PLAN: Mapping[str, ParallelStyle] = {
    "embed": ParallelStyle({"weight": SHARD_DIM0}, forward=embed),
    "layers.*.attn_norm": SEQUENCE,
    "layers.*.attn": ParallelStyle(
        {"sinks": SHARD_DIM0, "a_log": PARTIAL_GRADIENT, "dt_bias": PARTIAL_GRADIENT}, sequence_parallel=True
    ),
    "layers.*.attn.qkv*_proj": ROUTER,
    "layers.*.attn.[zba]_proj": ROUTER,
    "layers.*.attn.ba_proj": ROUTER,
    "layers.*.attn.conv": SEQUENCE,
    "layers.*.attn.norm": SEQUENCE,
    "layers.*.attn.out_proj": FIRST_RANK,
    "layers.*.attn.[qkv]_proj": COLWISE,
    "layers.*.attn.[qk]_norm": SEQUENCE,
    # latent attention: the narrow projections are whole, and their gradients come from the heads of this rank
    "layers.*.attn.q_a_proj": ROUTER,
    "layers.*.attn.kv_a_proj": ROUTER,
    "layers.*.attn.q_a_norm": SEQUENCE,
    "layers.*.attn.kv_a_norm": SEQUENCE,
    "layers.*.attn.q_b_proj": COLWISE,
    "layers.*.attn.kv_b_proj": COLWISE,
    "layers.*.attn.[qk]_width_norm": ParallelStyle({"weight": SHARD_DIM0}, forward=normalise_width),
    "layers.*.attn.o_proj": ROWWISE,
    "layers.*.attn_post_norm": SEQUENCE,
    "layers.*.mlp_norm": SEQUENCE,
    "layers.*.mlp": ParallelStyle(sequence_parallel=True),
    "layers.*.mlp.gate_proj": COLWISE,
    "layers.*.mlp.up_proj": COLWISE,
    "layers.*.mlp.down_proj": ROWWISE,
    "layers.*.moe": ParallelStyle(sequence_parallel=True, forward=mix),
    "layers.*.moe.router": ROUTER,
    "layers.*.moe.experts": EXPERT,
    "layers.*.moe.shared_gate": ROUTER,  # it scales a part of a sum
    "layers.*.moe.shared.gate_proj": COLWISE,
    "layers.*.moe.shared.up_proj": COLWISE,
    "layers.*.moe.shared.down_proj": ROWWISE,
    "layers.*.mlp_post_norm": SEQUENCE,
    "norm": ParallelStyle({"weight": PARTIAL_GRADIENT}, forward=normalise_and_gather),
    "head": COLWISE,
}


def parallelize(
    model: Model,
    mesh: DeviceMesh | None,
    precision: str,
    *,
    recomputed: Recompute = "none",
    compiled: bool = False,
    kernels: Mapping[str, str] = NO_KERNELS,
    plan: Mapping[str, ParallelStyle] = PLAN,
) -> Model:
    """Apply tensor parallelism, activation checkpointing, compilation, kernels of other packages and FSDP, in this
    order.

    The mesh has the dimensions ("replicate", "shard", "tensor"). `bf16` is FSDP2 with parameters in bfloat16 and
    reductions in fp32; what trains keeps fp32 master weights. Gradients are summed over the ranks. One process in fp32
    needs no FSDP and gets none. Raise ValueError for bf16 without a mesh, because FSDP keeps the master weights;
    UserError for a model that cannot be sharded.
    """
    assert precision in ("bf16", "fp32"), precision
    if precision == "bf16" and mesh is None:
        raise ValueError("bf16 needs a process group: make the World with ptf.compute.world.joined")
    if mesh is not None and mesh["tensor"].size() > 1:
        if not isinstance(model, Decoder):
            raise UserError("model.backend: hf needs compute.mesh.tensor_parallel_size: 1")
        cut(model, mesh["tensor"], plan if model.config.head == "lm" else {**plan, **_whole_head(model)})
    for block in model.layers:
        recompute(block, recomputed)
    if compiled:
        compile_parts(model)
    if kernels:
        use(model, kernels)
    if mesh is None or (mesh.size() == 1 and precision == "fp32"):
        return model
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    for module in (*model.layers, model):
        fully_shard(module, mesh=over, mp_policy=policy, shard_placement_fn=partial(_evenly, mesh["shard"].size()))
        sharded = cast("FSDPModule", module)
        # gradients are sums over ranks, not means; the factor alone would be a kind of sum that gloo does not have
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    # a rank that has not used a parameter would otherwise leave out a collective for which the others wait
    cast("FSDPModule", model).set_reduce_scatter_unused_params(True)
    return model


def _evenly(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Return the first dimension that the ranks divide, or None for the default (rows).

    32 experts over 128 ranks, sharded by experts, would leave 96 ranks with none.
    """
    shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    return next((Shard(dim) for dim, size in enumerate(shape) if size % ranks == 0), None)


def _whole_head(model: Decoder) -> dict[str, ParallelStyle]:
    """Return the plan of a scalar head or one of the user's own: it is not sharded."""
    return {name: WHOLE for name, _ in model.named_modules() if name.split(".")[0] == "head"}


def compiles(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return whether `train.compile` compiles on this device."""
    return device.type == "cuda" if setting == "auto" else setting


def compilation(setting: bool | Literal["auto"], device: torch.device, kernels: Mapping[str, str] = NO_KERNELS) -> str:
    """Return what `train.compile` does on this device, and `train.fused` with it, for a run's first lines."""
    compiled = "compiled" if compiles(setting, device) else "not compiled"
    liger = kernels.get("liger_kernel")
    return (
        f"norms and rotary {compiled}, gates by liger_kernel {liger}"
        if liger
        else f"norms, gates and rotary {compiled}"
    )


ROTATIONS = 64  # compiled at most: for each number of heads, width and dtype, and with and without gradients


def _compiled(function: Callable[..., Tensor]) -> Any:
    """Compile a function for any shape; rotations for any number of rows, because compiled for any shape they
    took almost five times what their bytes need (docs/gpu_status.md)."""
    if function is not rotate:
        return torch.compile(function, dynamic=True)
    compiler: Any = torch.compile  # whose type knows no recompile_limit yet
    return compiler(function, dynamic=False, recompile_limit=ROTATIONS)


def _rows(x: Tensor) -> Tensor:
    """Return [B, T, ..] as [B·T, ..], whose number of rows a compiled function takes as it is."""
    rows = x.flatten(0, 1)
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


def compile_parts(model: nn.Module, compiler: Callable[[Any], Any] = _compiled) -> None:
    """Compile what lies between the matrix products (norms, gates, rotary embeddings), for any shape.

    Attention is compiled where that is faster (attention.py), and the whole model never, because the number of
    documents differs from step to step. One function serves all layers: torch compiles at most 8 variants of a
    function, and would run the other layers uncompiled. So tensors are given as rows, [B·T, ..]: a batch of one
    sequence, and the norms of heads and of layers, are no variants of their own. `compiler` is given each function.
    """
    functions: tuple[Any, ...] = (normalised, gated, clamped, rotate)
    compiled = {function: compiler(function) for function in functions}

    def norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        return compiled[normalised](x.flatten(0, -2), weight, eps, offset).view(x.shape)

    def gate(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        return compiled[gated](activate, gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

    def turn(x: Tensor, table: Table) -> Tensor:
        return compiled[rotate](_rows(x), tuple(map(_rows, table[:2]))).view(x.shape)

    for module in model.modules():
        if isinstance(module, RMSNorm | MLP):
            module.compute = norm if isinstance(module, RMSNorm) else gate  # type: ignore[assignment]
        elif isinstance(module, Attention | LatentAttention):
            module.rotate = turn  # type: ignore[assignment]
        elif isinstance(module, Experts):
            module.compute = partial(compiled[module.compute.func], *module.compute.args)
