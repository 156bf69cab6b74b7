"""Forward passes over samples, for what a model says about them: log-probs, values, scores.

The one idea: every rank brings its own samples, and all make equally many passes, because sharded models gather their weights together.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptf.compute.world import World, alone
from ptf.data.batch import Batch
from ptf.data.packing import pack_all
from ptf.data.prefixes import pack_shared
from ptf.data.sample import Atom, Sample
from ptf.model.chunked import token_logprobs
from ptf.model.decoder import Decoder
from ptf.model.sampling import Processing
from ptf.train.deal import deal, dealt_alone


def passes(
    samples: Sequence[Sample], world: World, *, width: int, micro_rows: int, pack: Callable[[Sequence[Atom], int], list[list[Atom]]] = pack_all
) -> Iterator[tuple[list[list[Atom]], Batch]]:  # fmt: skip
    """Packed rows with their batch, on its device; those without rows are there so that other ranks have theirs. A `width` of 0: every sample has one
    of its own, so that what is found does not depend, in its last bits, on who is beside it. In a batch's rows the source of a sample is its number."""
    atoms: list[Atom] = [(replace(sample, source=str(number)),) for number, sample in enumerate(samples)]
    rows = pack(atoms, width) if width else [[atom] for atom in atoms]
    each = micro_rows if width else 1
    batches = deal(rows, alone(world), micro_rows, width) if width else dealt_alone(rows, alone(world))[0]
    idle = deal([], alone(world), 1, width)[0]
    for i in range(int(world.max(len(batches)))):
        yield rows[i * each : (i + 1) * each], (batches[i] if i < len(batches) else idle).to(world.device)


def packing(model: Decoder) -> Callable[[Sequence[Atom], int], list[list[Atom]]]:
    """How rows are made for it."""
    return pack_shared if model.shares_beginnings else pack_all


@torch.no_grad()
def per_token(
    model: Decoder, samples: Sequence[Sample], world: World, reduce: Callable[[Tensor, Any, Batch], Tensor], *, width: int, micro_rows: int
) -> list[np.ndarray]:  # fmt: skip
    """What `reduce` makes of hidden states, head and batch, [B, T] aligned with targets, as [n] of each sample, aligned with its tokens."""
    out: list[np.ndarray] = [np.zeros(len(s), np.float32) for s in samples]
    for rows, batch in passes(samples, world, width=width, micro_rows=micro_rows, pack=packing(model)):
        values = model(batch.tokens, batch.positions, batch.segments, lambda x, head, b=batch: reduce(x, head, b)).cpu().numpy()  # [B, T]
        for row, line in zip(rows, values, strict=False):
            at = 0
            for sample in itertools.chain.from_iterable(row):
                out[int(sample.source)][sample.begins + 1 :] = line[at : at + len(sample) - 1]
                at += len(sample)
    return out


@torch.no_grad()
def per_document(
    model: Decoder, samples: Sequence[Sample], world: World, find: Callable[[Decoder, Batch], Tensor], *, width: int, micro_rows: int
) -> list[float]:  # fmt: skip
    """What `find` makes of a batch, [documents], of each sample."""
    out = [0.0] * len(samples)
    for rows, batch in passes(samples, world, width=width, micro_rows=micro_rows):
        found = iter(find(model, batch).tolist())
        for row in rows:
            for (sample,) in row:
                out[int(sample.source)] = next(found)
    return out


def sample_logprobs(model: Decoder, samples: Sequence[Sample], world: World, *, width: int, micro_rows: int, how: Processing) -> list[np.ndarray]:
    """Log-probs of each sample's trained tokens, from what they were drawn from, aligned with its tokens and 0 elsewhere: [n] each."""
    logprobs = lambda x, head, batch: token_logprobs(x, head, batch.targets, batch.weights, how, batch.streams.get("states")).logprobs  # noqa: E731
    return per_token(model, samples, world, logprobs, width=width, micro_rows=micro_rows)
