"""How the ranks of a run are divided, and the process groups of each view of them: built once, before any model."""

import logging
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptf.config.sections.compute import MeshSizes

ONE = MeshSizes()


@dataclass(frozen=True)
class Meshes:
    """How the ranks are divided, and their process groups."""

    sizes: MeshSizes = ONE
    # ("replicate", "shard", "tensor"), over which weights are divided: ranks that divide sequences are shards, too.
    # None: one process without collectives
    dense: DeviceMesh | None = None
    data: dist.ProcessGroup | None = None  # ranks that see different data, this one among them; None: all ranks
    context: dist.ProcessGroup | None = None  # ranks that divide the sequences of this one; None: it has whole ones
    model: dist.ProcessGroup | None = None  # ranks that see the same data as this one; None: it alone

    @classmethod
    def of(cls, device: str, sizes: MeshSizes) -> Self:
        """Build the groups; all ranks call it together."""
        shape = (sizes.replicate, sizes.shard * sizes.context, sizes.tensor)
        dense = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        # it logs hints about microseconds at an export, 4 lines each
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        if sizes.model == 1:
            return cls(sizes, dense)
        if sizes.context == 1:
            data = dense["replicate", "shard"]._flatten("data").get_group()
            return cls(sizes, dense, data, model=dense["tensor"].get_group())
        fine = dense._unflatten("shard", (sizes.shard, sizes.context), ("own_shard", "context"))
        data, model = fine["replicate", "own_shard"]._flatten("data"), fine["context", "tensor"]._flatten("model")
        return cls(sizes, dense, data.get_group(), fine["context"].get_group(), model.get_group())
