"""No stage is silent: it says what it does, how far it is and how long it will take, as often as is due."""

import re
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptf.config import loads
from ptf.evaluate.evaluation import evaluate_run
from ptf.publish import publishing
from ptf.recipes.grpo.recipe import GRPO
from ptf.rl.engines.native import NativeEngine
from ptf.run import run
from ptf.storage import file_verification
from ptf.training_run import Run
from ptf.workspace import progress
from tests.tiny import arithmetic, online

EVERY_S = 0.1
LONGEST_S = 10 * EVERY_S  # between two lines, where other processes take the CPU
SLOW_S = 1.2 * LONGEST_S  # what each phase takes


class Recorded:
    """A stream that is no terminal and notes when each line came."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines += [(time.monotonic(), line) for line in text.splitlines() if line]
        return len(text)

    def flush(self) -> None:
        pass

    def gap(self, without: str = "-") -> float:
        """Return the longest time between two lines that do not begin with this."""
        times = [at for at, line in self.lines if not line.startswith(without)]
        return max(b - a for a, b in pairwise(times))


def slowed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    act: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return act(*args, **options)

    monkeypatch.setattr(owner, name, slow)


@pytest.fixture
def raw(tmp_path: Path) -> dict:
    raw = online(arithmetic(tmp_path), tmp_path, prompts_per_step=2, group_size=2)
    raw["train"]["steps"] = 1
    evaluate = {
        "sources": {"dev": raw["data"]["sources"]["p"]},
        "limit": 2,
        "samples_per_prompt": 1,
        "max_new_tokens": 6,
    }
    return raw | {"evaluate": evaluate, "publish": {"gate": "unmeasured"}}


def stages(raw: dict, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Train, evaluate and publish with slow rollouts, updates and verification; return what they printed."""
    slowed(monkeypatch, NativeEngine, "_logits", SLOW_S / 5)
    slowed(monkeypatch, GRPO, "loss", SLOW_S)
    slowed(monkeypatch, file_verification, "_sha256", 2 * EVERY_S)
    slowed(monkeypatch, publishing, "model_difference", SLOW_S)
    out = Recorded()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        directory = run(loads(yaml.safe_dump(raw)), "a")
        trained = Run.at(directory)
        evaluate_run(trained.job, directory)
        publishing.publish(trained.job, Run.at(directory).artifact())
    return out


def test_no_stage_is_silent_for_longer_than_the_interval(raw: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", EVERY_S)
    out = stages(raw, monkeypatch)
    assert out.gap() <= LONGEST_S, out.lines
    assert out.gap(without="progress: ") > LONGEST_S, "the phases are slow enough to tell"
    said = [line for _, line in out.lines if line.startswith("progress: ")]
    for words in (
        r"train, \d+ s › steps, 0 of 1 steps, \d+ s › rollout, .* › generate 4 responses, \d of 6 tokens each",
        r"train, .* › forward_backward, \d+ s › passes, 0 of 1 micro-batches",
        r"evaluate, .* dev greedy, 0 of 2 responses, .* › generate 2 responses, [1-6] of 6 tokens each, .* s left",
        r" › verify .* MiB",
        r"publish, \d+ s",
    ):
        assert any(re.search(words, line) for line in said), (words, said)
    counts = [int(found[1]) for line in said if (found := re.search(r"generate 4 responses, (\d) of 6", line))]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_a_line_says_how_far_it_is_and_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    phase = progress.Phase("steps", 1000, "steps", first=200, done=200, began=now[0])
    assert str(phase) == "steps, 200 of 1,000 steps, 0 s"
    now[0] += 60
    phase.advance(40)
    assert str(phase) == "steps, 240 of 1,000 steps, 60 s, about 1,140 s left"
    assert str(progress.Phase("read", began=now[0])) == "read, 0 s"


def test_without_a_stage_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that imports ptf prints what it likes; inside a stage another one is a phase."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with progress.phase("reading"):
        time.sleep(0.01)
    assert not capsys.readouterr().out
    with progress.stage("outer"), progress.stage("inner"):
        time.sleep(0.01)
    assert "progress: outer, 0 s › inner, 0 s\n" in capsys.readouterr().out
    assert not progress.REPORTER.phases
