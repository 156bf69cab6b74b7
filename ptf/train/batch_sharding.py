"""Distribution of packed sequences over ranks, also where their number does not divide evenly.

Sharded models gather their weights together, so every rank must make the same number of forward passes; a rank with
fewer sequences adds sequences that train nothing. Sequences are distributed so that the ranks' attention work is nearly
equal.
"""

from collections.abc import Sequence

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.document import PackUnit, length
from ptf.data.packing import balanced, idle
from ptf.data.rank_balancing import work_of


def shard_sequences_singly(sequences: Sequence[Sequence[PackUnit]], world: World) -> tuple[list[Batch], list[int]]:
    """Return this rank's sequences as batches of one, and their numbers in the step, for the deterministic mode.

    Each batch is as wide as its sequence, so nothing about it depends on the number of ranks. Every rank gets the same
    number of batches; the last ones may train nothing.
    """
    padded = [*sequences, *[[idle(sequences)]] * (-len(sequences) % world.size)]
    numbers = range(world.rank, len(padded), world.size)
    return [Batch.of([padded[i]], sum(length(unit) for unit in padded[i])) for i in numbers], list(numbers)


def deal(
    sequences: Sequence[Sequence[PackUnit]], world: World, micro_batch_sequences: int, seq_len: int
) -> list[Batch]:
    """Return this data-parallel rank's share of the sequences as micro-batches, at least one and equally many on every
    rank.

    All ranks pass the same sequences.
    """
    sequences_per_rank = max(1, -(-len(sequences) // world.meshes.sizes.data))
    # On a GPU batches have one shape, so that attention is compiled once; a CPU gains from less padding.
    if world.device.type == "cuda":
        sequences_per_rank = -(-sequences_per_rank // micro_batch_sequences) * micro_batch_sequences
    shares = balanced([work_of(sequence) for sequence in sequences], world.meshes.sizes.data)
    own_sequences = [sequences[i] for i in shares[world.data_rank]]
    own_sequences += [[idle(sequences)]] * (sequences_per_rank - len(own_sequences))
    if world.device.type == "cpu":
        seq_len = max(sum(length(unit) for unit in sequence) for sequence in own_sequences)
    return [
        Batch.of(own_sequences[i : i + micro_batch_sequences], seq_len)
        for i in range(0, sequences_per_rank, micro_batch_sequences)
    ]
