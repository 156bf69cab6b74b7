"""The configs in configs/agents: each passes the checks, and trains as it is."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml

from ptf.config.plugin_checks import load_checked
from tests.conftest import ROOT
from tests.tiny import job_file

ALL = sorted((ROOT / "configs" / "agents").glob("*.yaml"))
WITHOUT = ("calculator", "nim", "smolagents")  # agents and plays in code of their own
OWN = [config for config in ALL if config.stem.startswith(WITHOUT) or config.stem.endswith("_sft")]
CONFIGS = [config for config in ALL if config not in OWN]  # those of libraries
PACKAGES = ["gymnasium", "mcp", "reasoning_gym", "textarena"]


def if_installed(config):
    """``config`` as a parameter of a test that is skipped where its library, named as the file is, is absent."""
    package = config.stem.removesuffix("_sft")
    missing = package in PACKAGES and importlib.util.find_spec(package) is None
    return pytest.param(config, id=config.stem, marks=pytest.mark.skipif(missing, reason=f"needs {package}"))


def test_every_library_with_a_config_has_a_test() -> None:
    assert {config.stem for config in CONFIGS} == {*PACKAGES} - {"mcp"}


@pytest.mark.parametrize("config", map(if_installed, OWN))
def test_the_checks_find_nothing_in_agents_of_their_own(config) -> None:
    load_checked(config)


@pytest.mark.parametrize("config", map(if_installed, CONFIGS))
def test_the_checks_find_nothing(config, tmp_path) -> None:
    load_checked(config)
    wrong = yaml.safe_load(config.read_text())  # negative control
    ((wrong["rollout"].get("environment") or wrong["rollout"]["reward"]).setdefault("args", {}))["idd"] = 1
    with pytest.raises(Exception, match="has no argument 'idd'"):
        load_checked(job_file(wrong, tmp_path))


@pytest.mark.e2e
@pytest.mark.parametrize("config", map(if_installed, CONFIGS))
def test_it_trains(config, tmp_path) -> None:
    command = [sys.executable, "-m", "ptf.cli", "train", str(config), "--run-name", "a"]
    sets = [
        "train.steps=2",
        "compute.launcher=local",
        "rollout.engine=native",
        "rollout.prompts_per_step=4",
        "evaluate.limit=4",
        "model.path=prepare:model",  # not the one that SFT makes
        "model.init=random",
        f"output={tmp_path}/run",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, *(f"--set={one}" for one in sets)], check=True, timeout=400, env=environment, cwd=tmp_path
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "a" / "metrics.jsonl").open()]
    steps = [row for row in rows if "reward" in row]
    assert len(steps) == 2
    assert all(row["no_result_share"] == 0 for row in steps)
    assert any(row["reward_std"] > 0 for row in steps)


MISSING = """
import importlib, importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {packages} else find(name, *more)
for package in {packages}:
    try:
        importlib.import_module(f"ptf.rl.environments.{{package}}")
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    command = [sys.executable, "-c", MISSING.format(packages=PACKAGES)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT).stdout.splitlines()
    assert len(lines) == len(PACKAGES)
    for package, line in zip(PACKAGES, lines, strict=True):
        extra = package.replace("_", "-")
        assert line == f"UserError the package {package} is not installed: pip install 'ptf[{extra}]'"
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
