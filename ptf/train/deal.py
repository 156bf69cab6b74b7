"""Dealing packed rows to ranks when there are not equally many for each.

The one idea: sharded models gather their weights together, so every rank must make the same number of forward passes; who has fewer rows
fills up with a row that trains nothing. Rows are dealt so that the ranks' work of attention is nearly alike.
"""

from collections.abc import Sequence

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.packing import balanced, idle
from ptf.data.sample import Atom, length


def dealt_alone(rows: Sequence[Sequence[Atom]], world: World) -> tuple[list[Batch], list[int]]:
    """For the deterministic mode: this rank's rows, each a batch as wide as it is, so that nothing about them depends on the number of ranks; and
    their numbers in the step. Equally many on every rank, of which the last ones may train nothing."""
    padded = [*rows, *[[idle(rows)]] * (-len(rows) % world.size)]
    mine = range(world.rank, len(padded), world.size)
    return [Batch.of([padded[i]], sum(length(atom) for atom in padded[i])) for i in mine], list(mine)


def deal(rows: Sequence[Sequence[Atom]], world: World, micro_rows: int, width: int) -> list[Batch]:
    """This data-parallel rank's share as micro-batches; equally many on every rank, one at least. All ranks pass the same rows."""
    most = max(1, -(-len(rows) // world.data_size))
    if world.device.type == "cuda":  # a GPU wants batches of one shape, whose attention is compiled once; a CPU wants no padding
        most = -(-most // micro_rows) * micro_rows
    work = [sum(len(sample) * (len(sample) + 2 * sample.begins) for atom in row for sample in atom) for row in rows]
    mine = [rows[i] for i in balanced(work, world.data_size)[world.data_rank]]
    mine += [[idle(rows)]] * (most - len(mine))
    if world.device.type == "cpu":
        width = max(sum(length(atom) for atom in row) for row in mine)
    return [Batch.of(mine[i : i + micro_rows], width) for i in range(0, most, micro_rows)]
