"""A checkpoint that is written beside training: all ranks say the same of it, and Ctrl-C is no failed checkpoint."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ptf.compute import saver
from ptf.compute.checkpoint import Checkpoints
from ptf.compute.saver import BackgroundWriter, Saver
from ptf.compute.world import World
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.config.sections.compute import MeshSizes
from tests.model.ranks import two_ranks, world_of


def polled(place: str, late: int) -> list[tuple[list[bool], int]]:
    """Write two checkpoints on two ranks, of which one ends later, and ask until they are written. Return the answers
    and the number of files of each."""
    rank, write = dist.get_rank(), saver.write

    def slow(*args: Any) -> Any:
        entries = write(*args)
        time.sleep(0.3 if rank == late else 0.0)
        return entries

    saver.write = slow
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = BackgroundWriter(world_of(MeshSizes(shard=2)), 30.0)
    found = []
    for number in range(2):
        writer.begin(f"{place}/{number}", model, optimizer, {})
        answers = []
        while not (answers and answers[-1]):
            dist.barrier()
            answers.append(writer.wait(0.0))
        assert writer.error is None
        found.append((answers, len(writer.entries)))
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_end_at_different_times_answer_alike(tmp_path: Path, late: int) -> None:
    first, second = two_ranks(partial(polled, str(tmp_path), late), tmp_path)
    assert first == second
    for answers, files in first:
        assert answers[-1] is True
        assert not any(answers[:-1])
        assert files > 1
    assert len(first[0][0]) > 1, "it was asked before it was written"


def test_an_interrupt_while_it_waits_is_no_failed_checkpoint() -> None:
    def interrupted(wait_s: float) -> bool:
        raise KeyboardInterrupt

    writer: Any = SimpleNamespace(wait=interrupted, join=interrupted, thread=object(), world=World(), timeout_s=1.0)
    one = Saver(Checkpoints("", CheckpointConfig(every=1), 3), writer, step=3)
    with pytest.raises(KeyboardInterrupt):
        one.wait()
