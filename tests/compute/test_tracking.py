"""Sinks besides the file and the console."""

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ptf.compute import tracking
from ptf.compute.tracking import StepLines, Tracker, read_metrics, weights_and_biases
from ptf.config.sections.track import TrackConfig
from ptf.errors import UserError
from tests.tiny import arithmetic
from tests.train.test_loop import facts, train


def test_weights_and_biases_gets_every_step_and_the_run_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append((step, metrics))

        def finish(self) -> None:
            calls.append("finished")

    module = types.ModuleType("wandb")
    module.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))  # type: ignore[attr-defined]
    module.login = lambda **given: logged_in[0]  # type: ignore[attr-defined]
    module.Error = RuntimeError  # type: ignore[attr-defined]
    logged_in = [True]
    module.init = lambda **given: calls.append(given) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    track = Tracker(tmp_path / "a-run", TrackConfig(tensorboard=False, wandb_project="a-project"), resumed=0, steps=2)
    for step in (1, 2):
        track.log(step, {"loss": 1.0 / step})
    track.close()
    begun, *logged, finished = calls
    assert (begun["project"], begun["name"], begun["resume"]) == ("a-project", "a-run", "allow")
    assert logged == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert finished == "finished"

    def id_of(directory: Path) -> str:
        weights_and_biases(directory, "a-project")
        return calls[-1]["id"]

    elsewhere = tmp_path / "other" / "a-run"
    elsewhere.mkdir(parents=True)
    assert id_of(tmp_path / "a-run") == begun["id"], "a resume continues its run"
    assert id_of(elsewhere) != begun["id"], "a run of the same name in another directory is another run"
    logged_in[0] = False
    with pytest.raises(UserError, match="there is no login to Weights & Biases here: run `wandb login`"):
        id_of(elsewhere)
    assert [row["step"] for row in read_metrics(tmp_path / "a-run" / "metrics.jsonl")] == [1, 2]


def test_without_the_package_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"track\.wandb_project: the package wandb is not installed"):
        Tracker(tmp_path, TrackConfig(tensorboard=False, wandb_project="a-project"), resumed=0, steps=2)


BAD = ["", "{", '{"loss": 1}', "[1]", "12", '{"step": "a"}', "\udcff"]


@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_is_no_row_is_named_unless_it_is_the_last(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [f'{{"step": {step}}}' for step in (1, 2, 3)]
    file.write_bytes("\n".join([*rows, bad]).encode(errors="surrogateescape"))
    assert [row["step"] for row in read_metrics(file)] == [1, 2, 3]
    file.write_bytes("\n".join([rows[0], bad, *rows[1:]]).encode(errors="surrogateescape") + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a row"):
        read_metrics(file)


def test_a_run_whose_metrics_were_damaged_does_not_go_on_as_if_they_ended_there(tmp_path: Path) -> None:
    raw = arithmetic(tmp_path)
    directory = train(raw, "a")
    whole, file = facts(directory), directory / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:3], lines[3][:20] + "\n", *lines[4:]]))
    held = file.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl:4 is not a row"):
        train(raw, "a")
    assert file.read_bytes() == held
    file.write_text("".join(lines))
    assert facts(train(raw, "a")) == whole


def test_steps_lines_do_not_ask_an_object_store_for_the_lease(tmp_path: Path) -> None:
    """They are written at each step, and an object store takes a tenth of a second to answer."""
    asked: list[bool] = []

    class Held:
        @contextlib.contextmanager
        def commit(self, local: bool = False) -> Iterator[None]:
            asked.append(local)
            yield

    lines = StepLines(tmp_path / "lines.jsonl", 0, Held())  # type: ignore[arg-type]
    lines.add({"step": 1})
    lines.file.close()
    assert asked == [True, True]
    assert [row["step"] for row in read_metrics(tmp_path / "lines.jsonl")] == [1]


def test_a_row_is_on_the_disk_before_the_step_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, synced = StepLines(tmp_path / "lines.jsonl", 0), list[str]()
    monkeypatch.setattr(tracking.os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    lines.add({"step": 1})
    assert synced == [str(tmp_path / "lines.jsonl")]
    assert [row["step"] for row in read_metrics(tmp_path / "lines.jsonl")] == [1]
    lines.file.close()
