"""Forward passes over samples without training: log-probs, values, one value per document.

Every rank has its own samples, but all ranks make the same number of passes, because gathering the weights of a sharded
model is a collective.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptf.compute.world import World, alone
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.packing import pack_all
from ptf.data.prefixes import pack_shared
from ptf.model.chunked import sampled_from, token_logprobs
from ptf.model.model import Model
from ptf.model.sampling import LogitsProcessing
from ptf.train.batch_sharding import deal, shard_sequences_singly
from ptf.workspace import progress


def packed_batches(
    samples: Sequence[Document],
    world: World,
    *,
    seq_len: int,
    micro_batch_sequences: int,
    pack: Callable[[Sequence[PackUnit], int], list[list[PackUnit]]] = pack_all,
) -> Iterator[tuple[list[list[PackUnit]], Batch]]:
    """Yield packed sequences with their batch, which is on the device.

    Batches without sequences are added so that all ranks make the same number of passes. With `seq_len` 0, every sample
    has its own sequence, so that the last bits of its results do not depend on other samples. In the sequences,
    `source` of a sample is its index.
    """
    units: list[PackUnit] = [(replace(sample, source=str(number)),) for number, sample in enumerate(samples)]
    sequences = pack(units, seq_len) if seq_len else [[unit] for unit in units]
    each = micro_batch_sequences if seq_len else 1
    batches = (
        deal(sequences, alone(world), micro_batch_sequences, seq_len)
        if seq_len
        else shard_sequences_singly(sequences, alone(world))[0]
    )
    idle = deal([], alone(world), each, seq_len)[0]  # on a GPU with the shape of the others
    for i in progress.counted(range(int(world.max(len(batches)))), "log-probs", "batches"):
        yield sequences[i * each : (i + 1) * each], (batches[i] if i < len(batches) else idle).to(world.device)


def packer_of(model: Model) -> Callable[[Sequence[PackUnit], int], list[list[PackUnit]]]:
    """Return the function that packs samples into sequences for this model."""
    return pack_shared if model.supports_shared_prefixes else pack_all


@torch.no_grad()
def per_token(
    model: Model,
    samples: Sequence[Document],
    world: World,
    head_fn: Callable[[Batch, Tensor, Any], Tensor],
    *,
    seq_len: int,
    micro_batch_sequences: int,
) -> list[np.ndarray]:
    """Return the values of `head_fn` for each sample, [n] each, aligned with the sample's tokens.

    `head_fn` is a function of batch, hidden states and head; its result, [B, T], is aligned with the targets.
    """
    out: list[np.ndarray] = [np.zeros(len(s), np.float32) for s in samples]
    for sequences, batch in packed_batches(
        samples, world, seq_len=seq_len, micro_batch_sequences=micro_batch_sequences, pack=packer_of(model)
    ):
        found = batch.through(model, functools.partial(head_fn, batch))  # [B, T]
        for sequence, line in zip(sequences, found.cpu().numpy(), strict=False):
            at = 0
            for sample in itertools.chain.from_iterable(sequence):
                out[int(sample.source)][sample.prefix_length + 1 :] = line[at : at + len(sample) - 1]
                at += len(sample)
    return out


@torch.no_grad()
def per_document(
    model: Model,
    samples: Sequence[Document],
    world: World,
    find: Callable[[Model, Batch], Tensor],
    *,
    seq_len: int,
    micro_batch_sequences: int,
) -> list[float]:
    """Return one value per sample, computed by `find`, a function of model and batch that returns [documents]."""
    out = [0.0] * len(samples)
    for sequences, batch in packed_batches(
        samples, world, seq_len=seq_len, micro_batch_sequences=micro_batch_sequences
    ):
        values = iter(find(model, batch).tolist())
        for sequence in sequences:
            for (sample,) in sequence:
                out[int(sample.source)] = next(values)
    return out


def sample_logprobs(
    model: Model,
    samples: Sequence[Document],
    world: World,
    *,
    seq_len: int,
    micro_batch_sequences: int,
    processing: LogitsProcessing,
) -> list[np.ndarray]:
    """Return the log-probs of each sample's trained tokens under the distribution that they were sampled from.

    Each is [n], aligned with the sample's tokens, and 0 for tokens that are not trained.
    """

    def logprobs(batch, x, head):
        return token_logprobs(x, head, **sampled_from(batch, processing)).logprobs

    return per_token(model, samples, world, logprobs, seq_len=seq_len, micro_batch_sequences=micro_batch_sequences)
