"""Sharding from outside: the model files are written for one device, and this file distributes them over many.

How tensor parallelism shards each parameter is a table over unified names; data parallelism (FSDP2, HSDP) needs none,
because it shards every parameter alike.
"""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ptf.errors import UserError
from ptf.meshes import Meshes
from ptf.model.context_parallel import context_parallel
from ptf.model.decoder import Decoder
from ptf.model.model import Model
from ptf.model.recompute import Recompute, recompute
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
    meshes: Meshes,
    precision: str,
    *,
    recomputed: Recompute = "none",
    plan: Mapping[str, ParallelStyle] = PLAN,
) -> Model:
    """Apply tensor parallelism, context parallelism, activation checkpointing and FSDP, in this order.

    `bf16` is FSDP2 with parameters in bfloat16 and reductions in fp32; what trains keeps fp32 master weights. Gradients
    are summed over the ranks. One process in fp32 needs no FSDP and gets none. Raise ValueError for bf16 without a
    mesh, because FSDP keeps the master weights; UserError for a model that cannot be sharded.
    """
    assert precision in ("bf16", "fp32"), precision
    mesh, sizes = meshes.dense, meshes.sizes
    if precision == "bf16" and mesh is None:
        raise ValueError("bf16 needs a process group: make the World with ptf.compute.world.joined")
    if mesh is not None and sizes.model > 1:
        if not isinstance(model, Decoder):
            raise UserError("model.backend: hf needs compute.mesh: tensor_parallel_size 1 and context_parallel_size 1")
        if sizes.tensor > 1:
            if model.config.head != "lm":  # a scalar head or one of the user's own is not sharded
                plan = {**plan, **{name: WHOLE for name, _ in model.named_modules() if name.split(".")[0] == "head"}}
            cut(model, mesh["tensor"], plan)
        if sizes.context > 1:
            context_parallel(model, meshes)
    if recomputed != "none":
        for block in model.layers:
            recompute(block, recomputed)
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
