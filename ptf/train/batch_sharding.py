"""Distribution of packed rows over ranks, also where their number does not divide evenly.

Sharded models gather their weights together, so every rank must make the same number of forward passes; a rank with
fewer rows adds rows that train nothing. Rows are distributed so that the ranks' attention work is nearly equal.
"""

from collections.abc import Sequence

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.packing import balanced, idle
from ptf.data.sample import PackUnit, length


def shard_rows_singly(rows: Sequence[Sequence[PackUnit]], world: World) -> tuple[list[Batch], list[int]]:
    """Return this rank's rows as batches of one row, and their numbers in the step, for the deterministic mode.

    Each batch is as wide as its row, so nothing about it depends on the number of ranks. Every rank gets the same
    number of batches; the last ones may train nothing.
    """
    padded = [*rows, *[[idle(rows)]] * (-len(rows) % world.size)]
    numbers = range(world.rank, len(padded), world.size)
    return [Batch.of([padded[i]], sum(length(unit) for unit in padded[i])) for i in numbers], list(numbers)


def deal(rows: Sequence[Sequence[PackUnit]], world: World, micro_rows: int, width: int) -> list[Batch]:
    """Return this data-parallel rank's share of the rows as micro-batches, the same number on every rank and at least
    one.

    All ranks pass the same rows.
    """
    rows_per_rank = max(1, -(-len(rows) // world.data_size))
    # On a GPU batches have one shape, so that attention is compiled once; a CPU gains from less padding.
    if world.device.type == "cuda":
        rows_per_rank = -(-rows_per_rank // micro_rows) * micro_rows
    work = [
        sum(len(sample) * (len(sample) + 2 * sample.prefix_length) for unit in row for sample in unit) for row in rows
    ]
    own_rows = [rows[i] for i in balanced(work, world.data_size)[world.data_rank]]
    own_rows += [[idle(rows)]] * (rows_per_rank - len(own_rows))
    if world.device.type == "cpu":
        width = max(sum(length(unit) for unit in row) for row in own_rows)
    return [Batch.of(own_rows[i : i + micro_rows], width) for i in range(0, rows_per_rank, micro_rows)]
