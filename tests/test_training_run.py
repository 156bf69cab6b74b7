import dataclasses
from pathlib import Path

import pytest

from ptf.training_run import Run


def test_a_run_is_what_was_read_and_is_not_written_to():
    run = Run(Path("runs/a"), None, {}, (3,))  # type: ignore[arg-type]
    assert run.name == "a"
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.checkpoints = ()  # type: ignore[misc]
    assert run == Run(Path("runs/a"), None, {}, (3,))  # type: ignore[arg-type]
