"""The code of plugins is part of what identifies stored data, and a run knows where its plugins are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ptf
from ptf.compute.launch import as_child
from ptf.config import ConfigError, fingerprint, loads, plugin
from ptf.config.plugin import PLUGIN_PATH, PLUGINS, on_path, plugin_path
from ptf.config.plugin_code import code_of
from ptf.run import write_job_file

CONFIG = """
recipe: sft
model: {path: m}
data: {prepare: {use: "USE"}, sources: {a: {path: "prepare:a.jsonl"}}}
train: {steps: 3, lr: 1e-4}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv(PLUGIN_PATH, "")
    files = {
        "own/__init__.py": "",
        "own/made.py": "import json\nfrom . import parts\nfrom ptf import errors\ndef make(place): import near\n",
        "own/parts.py": "from near import *\n",
        "near.py": "x = 1\n",
        "apart.py": "import own.made\n",
        "computed.py": "import importlib\nimportlib.import_module('ne' + 'ar')\n",
    }
    for name, text in files.items():
        file = tmp_path / "config" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    on_path([tmp_path / "config" / "job.yaml"])
    return tmp_path / "config"


def job_of(use: str, place: Path):
    return loads(CONFIG.replace("USE", use) + f"output: {place.parent / 'runs'}\n")


def test_the_key_of_prepared_data_follows_the_code_and_what_it_imports(place: Path) -> None:
    job = job_of("own.made:make", place)
    assert list(code_of(job.model_dump()).digests) == ["near", "own", "own.made", "own.parts"]
    keys = [fingerprint(job, "data.prepare")]
    for name in ("own/made.py", "near.py", "own/__init__.py"):
        (place / name).write_text((place / name).read_text() + "\n# corrected\n")
        keys.append(fingerprint(job, "data.prepare"))
    assert len(set(keys)) == 4
    (place / "apart.py").write_text("# nobody imports it\n")
    assert fingerprint(job, "data.prepare") == keys[-1]
    assert "own.made" not in sys.modules, "nothing was run"


@pytest.mark.parametrize(
    ("use", "reason"),
    [("computed:make", "computed.py:2 imports a module by a name that is computed"), ("absent:make", "absent is not")],
)
def test_where_a_change_goes_unnoticed_it_is_said(place: Path, use: str, reason: str) -> None:
    (said,) = code_of({"use": use}).unseen
    assert reason in said
    assert code_of({"use": "ptf.tasks.tiny:prepare"}).unseen == []


def test_a_run_knows_where_its_plugins_are_and_whether_they_changed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "runs" / "a"
    write_job_file(job_of("own.made:make", place), run)
    (place / "near.py").write_text("x = 2\n")
    write_job_file(job_of("own.made:make", place), run)
    assert "the code of near has changed since this run was last trained" in capsys.readouterr().out
    monkeypatch.setenv(PLUGIN_PATH, "")
    monkeypatch.chdir(tmp_path)
    on_path([run / "job.yaml"])
    assert plugin_path()[0] == str(place)
    assert str(run) not in plugin_path()
    assert plugin_path()[-1] == str(tmp_path)
    for damaged in ('{"directories": "/"', "[]", "{}"):
        (tmp_path / PLUGINS).write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            on_path([tmp_path / "job.yaml"])
    (tmp_path / PLUGINS).unlink()
    (tmp_path / "plugins.json").write_text("[]")  # of the user's own
    on_path([tmp_path / "job.yaml"])
    place.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=f"the run began with modules in {place}, which is gone"):
        plugin.resolve("own.made:make")
    write_job_file(job_of("ptf.tasks.tiny:prepare", place), tmp_path / "runs" / "b")
    assert not (tmp_path / "runs" / "b" / PLUGINS).exists()


def test_a_file_beside_the_config_hides_no_module_of_python_in_a_child(place: Path) -> None:
    for name in ("queue", "near_reward"):
        (place / f"{name}.py").write_text("raise SystemExit('this is not the module of Python')\n")
    (place / "near_reward.py").write_text("import queue\nqueue.SimpleQueue\nprint('imported')\n")
    root = str(Path(ptf.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, PLUGIN_PATH: str(place), **as_child()}
    for directory in (place, root):
        command = [sys.executable, "-m", "ptf.workspace.entry", "near_reward"]
        child = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
        assert child.stdout == "imported\n", child.stderr
