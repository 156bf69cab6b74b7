"""An evaluation is tried again where what failed it passes, as a port that another process had just taken does;
a fault of its own ends it."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ptf.artifact import Artifact
from ptf.config import loads
from ptf.errors import Lost, Retryable, Stopped, UserError, is_transient
from ptf.evaluate.evaluation import TRIES
from ptf.rl.engines.native import NativeEngine
from ptf.run import run
from steps.stages import evaluate
from tests.tiny import arithmetic

TAKEN: list[socket.socket] = []  # by others; each goes once somebody has run into it
WRONG: list[str] = []


def take() -> None:
    TAKEN.append(socket.socket())
    TAKEN[-1].bind(("127.0.0.1", 0))
    TAKEN[-1].listen()


class Listening(NativeEngine):
    """An engine that needs a port."""

    def __init__(self, directory: str, *, device: str, dtype: str, version: int, seed: int, max_length: int) -> None:
        super().__init__(
            directory, device=torch.device(device), dtype=getattr(torch, dtype), version=version, seed=seed
        )
        if WRONG:
            raise ValueError(WRONG[0])
        if TAKEN:
            with socket.socket() as own:
                try:
                    own.bind(TAKEN[-1].getsockname())
                finally:
                    TAKEN.pop().close()


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    """Evaluates a model that was trained for a step."""
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 1, "validate_every": 0}
    raw["data"].pop("validation")
    raw["evaluate"] = {
        "sources": {"sums": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}},
        "limit": 4,
        "samples_per_prompt": 1,
        "max_new_tokens": 4,
        "reward": {"use": "ptf.tasks.arithmetic:exact"},
        "engine": {"use": "tests.steps.test_evaluate:Listening"},
    }
    job = loads(yaml.safe_dump(raw | {"publish": {"gate": "unmeasured"}}))
    directory = run(job, "a")
    yield lambda: evaluate(job, Artifact(run_name="a", run=str(directory)))
    WRONG.clear()
    while TAKEN:
        TAKEN.pop().close()


def test_a_port_that_was_taken_is_tried_again(stage: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(TRIES - 1):
        take()
    assert "greedy_pass_rate/sums" in stage().metrics
    out = capfd.readouterr().out
    assert out.count("the evaluation is tried again") == TRIES - 1
    assert "Address already in use" in out
    for _ in range(TRIES):
        take()
    with pytest.raises(
        Retryable, match=f"the evaluation failed {TRIES} times; the last error was: .*Address already in use"
    ):
        stage()


def test_a_fault_of_its_own_is_not(stage: Any, capfd: pytest.CaptureFixture[str]) -> None:
    WRONG.append("no such head")
    with pytest.raises(ValueError, match="no such head"):
        stage()
    assert "tried again" not in capfd.readouterr().out


def test_what_passes_and_what_does_not() -> None:
    distributed = RuntimeError(
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
        "name: EADDRINUSE"
    )
    passing = [distributed, Lost("rank 1 died"), Retryable("Ray did not start"), ConnectionResetError("gone")]
    lasting = [UserError("no such file"), ValueError("x"), RuntimeError("shapes differ"), FileNotFoundError("x")]
    assert all(map(is_transient, passing))
    assert not any(map(is_transient, [*lasting, Stopped(1, 2, "there")]))
