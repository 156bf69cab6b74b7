"""Dealing packed rows to ranks when there are not equally many for each.

The one idea: sharded models gather their weights together, so every rank must make the same number of forward passes; who has fewer rows
fills up with a row that trains nothing.
"""

from collections.abc import Sequence

import numpy as np

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.sample import Atom, Sample, length

IDLE: Atom = (Sample(np.zeros(1, np.int32), np.zeros(1, np.float32)),)


def deal(rows: Sequence[Sequence[Atom]], world: World, micro_rows: int, width: int) -> list[Batch]:
    """This rank's share (rows r, r + W, …) as micro-batches; equally many on every rank. All ranks pass the same rows."""
    most = -(-len(rows) // world.size)
    mine = list(rows[world.rank :: world.size])
    mine += [[IDLE]] * (most - len(mine))
    if world.device.type == "cpu":  # a GPU wants one shape, a CPU wants no padding
        width = max(sum(length(atom) for atom in row) for row in mine)
    return [Batch.of(mine[i : i + micro_rows], width) for i in range(0, most, micro_rows)]
