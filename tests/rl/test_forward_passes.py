"""Forward passes over samples: values are the same however samples are packed and however many passes there are."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ptf.compute.world import World
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.sampling import NO_LOGITS_PROCESSING
from ptf.rl.forward_passes import packed_batches, per_document, per_token, sample_logprobs
from tests import tiny


def decoder(directory: Path) -> Decoder:
    model = bridge.build(tiny.checkpoint(directory / "m", tied=False))
    model.give_weights(directory / "m", torch.device("cpu"))
    return model


@pytest.mark.parametrize("micro_batch_sequences", [1, 2, 3])
def test_values_of_a_sample_are_its_own_in_any_batch(tmp_path: Path, micro_batch_sequences: int) -> None:
    """The last pass has fewer sequences than the others, so that rows of its batch have no sample."""
    model = decoder(tmp_path)
    samples = [tiny.sample(n, seed=n) for n in (14, 13, 12, 15, 11)]
    options = {"seq_len": 16, "micro_batch_sequences": micro_batch_sequences, "processing": NO_LOGITS_PROCESSING}
    found = sample_logprobs(model, samples, World(), **options)  # type: ignore[arg-type]
    alone = sample_logprobs(model, samples, World(), **options | {"seq_len": 0})  # type: ignore[arg-type]
    for sample, together, own in zip(samples, found, alone, strict=True):
        assert np.abs(together - own).max() <= 1e-5
        assert (own[sample.loss_weights == 0] == 0).all()
        assert (own[1:][sample.loss_weights[1:] != 0] < 0).all()
    lengths = per_document(
        model,
        samples,
        World(),
        lambda model, batch: torch.bincount(batch.segments[batch.segments >= 0]).float(),
        seq_len=16,
        micro_batch_sequences=micro_batch_sequences,
    )
    assert lengths == [14, 13, 12, 15, 11]
    positions = per_token(
        model, samples, World(), lambda batch, x, head: batch.positions.float(), seq_len=16, micro_batch_sequences=1
    )
    assert [p[1:].tolist() for p in positions] == [list(range(n - 1)) for n in (14, 13, 12, 15, 11)]


class Idle(World):
    """A rank of a group in which another one has two passes more."""

    def max(self, value: float | Sequence[float]) -> Tensor:
        return super().max(value) + 2


def test_ranks_make_the_same_number_of_passes(tmp_path: Path) -> None:
    passes = list(packed_batches([tiny.sample(9, 0)], Idle(), seq_len=16, micro_batch_sequences=1))
    assert [len(sequences) for sequences, _ in passes] == [1, 0, 0]
    assert all(float(batch.loss_weights.sum()) == 0 for _, batch in passes[1:])
    model = decoder(tmp_path)
    options = {"seq_len": 16, "micro_batch_sequences": 1, "processing": NO_LOGITS_PROCESSING}
    idle, alone = (sample_logprobs(model, [tiny.sample(9, 0)], world, **options) for world in (Idle(), World()))
    assert (idle[0] == alone[0]).all()
