"""Sharding from outside: the model file knows one device, this file cuts it over many."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ptf.model.decoder import Decoder


def parallelize(model: Decoder, mesh: DeviceMesh | None, precision: str) -> Decoder:
    """FSDP2 over the mesh ("replicate", "shard"), block by block. `bf16` computes in bfloat16 over fp32 master weights and reductions.
    One process in fp32 needs no wrapper and gets none. Raises ValueError for bf16 without a mesh, whose master weights FSDP keeps."""
    if precision == "bf16" and mesh is None:
        raise ValueError("bf16 needs a process group: make the World with ptf.compute.world.joined")
    if mesh is None or (mesh.size() == 1 and precision == "fp32"):
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
    over = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    for block in model.layers:
        fully_shard(block, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)
    return model
