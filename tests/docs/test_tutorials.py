"""docs/tutorials: the files that they give are written and pass `ptf check`, and every command is one that exists."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ptf
from ptf import cli
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.recipes.grpo.recipe import group_relative
from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def files(pages: list[Path]) -> dict[str, str]:
    """Name → text of every block of Python or YAML whose first line names a file."""
    found: dict[str, str] = {}
    for page in pages:
        for kind, text in BLOCK.findall(page.read_text()):
            named = re.match(r"# (\S+/\S+)\n", text)
            assert named or kind not in ("python", "yaml"), f"{page.name}: a block names no file: {text[:60]}"
            if named and named[1].startswith("configs/"):
                assert yaml.safe_load(text) == yaml.safe_load((ROOT / named[1]).read_text()), named[1]
            elif named and named[1].startswith("tutorial/"):
                assert found.setdefault(named[1], text) == text, f"{page.name} gives another {named[1]}"
    return found


def commands(page: Path) -> list[list[str]]:
    lines = [line for kind, text in BLOCK.findall(page.read_text()) if kind == "bash" for line in text.splitlines()]
    return [shlex.split(line.rpartition("| ")[2], comments=True) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the tutorials' files stand, with the data that the first one makes."""
    root = tmp_path_factory.mktemp("tutorials")
    (root / "tutorial").mkdir()
    for name, text in files(PAGES).items():
        (root / name).write_text(text)
    subprocess.run([sys.executable, "tutorial/make_data.py"], cwd=root, check=True, timeout=300)
    return root


@pytest.fixture
def tutorial(written: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, as the current directory, from which modules are imported."""
    monkeypatch.chdir(written)
    monkeypatch.syspath_prepend(written)
    yield written
    for name in [name for name in sys.modules if name.partition(".")[0] == "tutorial"]:
        del sys.modules[name]


def test_configs_are_right(tutorial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = sorted((tutorial / "tutorial").glob("*.yaml"))
    assert len(configs) >= 6
    for config in configs:
        name = str(config.relative_to(tutorial))
        later = (
            [] if Path(ptf.load(name).model.path).exists() else ["--skip-paths"]
        )  # an earlier run or script makes it
        assert cli.main(["check", *later, name]) == 0, capsys.readouterr().err
    # negative control: a misspelt argument of the reward
    right = (tutorial / "tutorial" / "grpo.yaml").read_text()
    (tutorial / "wrong.yaml").write_text(right.replace("args: {wrong:", "args: {wrogn:"))
    assert cli.main(["check", "wrong.yaml"]) == 2
    assert "wrogn" in capsys.readouterr().err


def test_made_data_and_rewards_are_as_told(tutorial: Path) -> None:
    rows = [json.loads(line) for line in (tutorial / "tutorial" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 70
    routed = importlib.import_module("tutorial.routing").routed

    assert [routed({"answer": "repair"}, text) for text in (" repair", "billing", "rep")] == [1.0, 0.2, 0.0]


def test_own_credit_pushes_only_what_is_above_the_median(tutorial: Path) -> None:

    def answer(outcome: Reward | NoResult) -> Trajectory:
        ids = np.array([3, 4], np.int32)
        generation = Generation(np.array([1, 2], np.int32), ids, np.zeros(2, np.float32), np.zeros(2, np.int32), True)
        return Trajectory(Prompt(np.array([1, 2], np.int32), {}, "messages", 0), (generation,), "", outcome)

    group = tuple(answer(outcome) for outcome in [Reward(1.0), Reward(0.0), Reward(0.0), NoResult("it raised")])
    module = importlib.import_module("tutorial.routing")
    recipe = module.AboveMedian(module.AboveMedianConfig(scale=2.0))
    units = recipe.compute_advantages([group, group[2:]])
    assert len(units) == 3  # nothing of the answer without a result, nor of the group with one result
    found = [advantages(sample) for (sample,) in units]
    assert [values.tolist() for values in found] == [[0, 0, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]


def advantages(sample: Any) -> np.ndarray:
    return sample.token_columns["advantages"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    given, found = files(PAGES), commands(page)
    assert found
    for line in found:
        if line[0] == "ptf":
            options = cli._parser().parse_args(line[1:])
            named = getattr(options, "config", None) or [getattr(options, "where", "")]
            assert all(name in given or (ROOT / name).is_file() for name in named if name.endswith(".yaml")), line
        elif line[0] == "python":
            assert line[1] in given or (ROOT / line[1]).is_file(), line
            words = [word for word in line if word.endswith(".yaml")]
            assert all(word in given or (ROOT / word).is_file() for word in words), line
        elif line[0] in ("pytest", "cp"):
            read = line[1:2] if line[0] == "cp" else [word for word in line if word.endswith(".py")]
            assert all((ROOT / word).is_file() for word in read), line
        elif line[0] == "make":
            assert f"\n{line[1]}:" in (ROOT / "Makefile").read_text(), line
        else:
            assert line[0] in ("mkdir", "export", "source", "tensorboard"), line


def test_the_advantages_that_the_page_quotes_are_those_of_grpo() -> None:

    text = (ROOT / "docs" / "tutorials" / "own_reward.md").read_text()
    right, wrong = group_relative(np.array([1.0] + [0.0] * 7), True)[:2]
    assert f"+{right:.2f}" in text
    assert f"−{-wrong:.2f}" in text
