"""The mesh of a run's ranks, and the groups of it that compute together.

Ranks of one model group hold every layer together and see the same data, so data is distributed, and sums are taken,
over ranks of different groups. Neighbours form a tensor group: they share a machine and its fast links.
"""

import logging
from dataclasses import asdict, astuple, dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptf.config.sections.compute import MeshSizes

ONE = MeshSizes()


@dataclass(frozen=True)
class Meshes:
    """How the ranks are divided, and their process groups."""

    sizes: MeshSizes = ONE
    dense: DeviceMesh | None = None  # with the axes of `sizes`; None: one process without collectives
    data: dist.ProcessGroup | None = None  # ranks that see different data, this one among them; None: all ranks

    @classmethod
    def of(cls, device: str, sizes: MeshSizes) -> Self:
        """Build the groups; all ranks call it together."""
        dense = init_device_mesh(device, astuple(sizes), mesh_dim_names=tuple(asdict(sizes)))
        # it logs hints about microseconds at an export, 4 lines each
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        data = dense["replicate", "shard"]._flatten("data").get_group() if sizes.model > 1 else None
        return cls(sizes, dense, data)
