"""A few of the random trials of `make bench-resume`, always the same ones."""

import random
from pathlib import Path

import pytest

from ptf.data.encoded import Encoded
from ptf.data.loader import Loader
from ptf.data.tokenizer import Tokenizer
from tests.data.trials import Trial, tried


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_a_resumed_run_is_one_that_never_stopped(seed: int, characters: Tokenizer, tmp_path: Path) -> None:
    found = tried(Trial.drawn(random.Random(seed), 200, 64), tmp_path, characters)
    assert (found.differences, found.not_once, found.not_said) == (0, 0, 0)


# ends within an epoch
IN_MIDST = Trial(
    {"a": 600}, {"a": "jsonl.gz"}, {"a": None}, 1, 4, None, {"temperature": 1.0}, 64, None, [1], 12, False, 3
)


def test_what_was_announced_is_what_came_where_rows_leave_nothing(
    characters: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the samples that wait in a window at the end stand for such rows is chance:
    the rows cannot be counted by a ratio of samples."""
    assert tried(IN_MIDST, tmp_path, characters).not_said == 0
    real = Encoded._placed
    monkeypatch.setattr(Encoded, "_placed", lambda self, row, units, without: real(self, row, units, 0))
    assert tried(IN_MIDST, tmp_path, characters).not_said == 1


def test_a_trial_sees_a_place_that_is_off_by_a_step(
    characters: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Loader.state_dict
    monkeypatch.setattr(
        Loader,
        "state_dict",
        lambda self: (state := real(self), next(self), state | {"partitions": real(self)["partitions"]})[-1],
    )
    trial = Trial({"a": 50}, {"a": "jsonl"}, {"a": None}, 4, 4, 2, {"temperature": 1.0}, 8, None, [1, 2], 2, False)
    assert tried(trial, tmp_path, characters).differences
