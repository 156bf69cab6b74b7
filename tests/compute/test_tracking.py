"""Sinks besides the file and the console."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ptf.compute.tracking import Tracker, read_metrics
from ptf.config.schema import TrackConfig
from ptf.errors import UserError


def test_weights_and_biases_gets_every_step_and_the_lineage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append((step, metrics))

        def finish(self) -> None:
            calls.append("finished")

    module = types.ModuleType("wandb")
    module.init = lambda **given: calls.append(given) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    track = Tracker(tmp_path / "a-lineage", TrackConfig(tensorboard=False, wandb="a-project"), resumed=0, steps=2)
    for step in (1, 2):
        track.log(step, {"loss": 1.0 / step})
    track.close()
    begun, *logged, finished = calls
    assert (begun["project"], begun["id"], begun["resume"]) == ("a-project", "a-lineage", "allow")
    assert logged == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert finished == "finished"
    assert [row["step"] for row in read_metrics(tmp_path / "a-lineage" / "metrics.jsonl")] == [1, 2]


def test_without_the_package_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"track\.wandb: the package wandb is not installed"):
        Tracker(tmp_path, TrackConfig(tensorboard=False, wandb="a-project"), resumed=0, steps=2)
