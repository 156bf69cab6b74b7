"""Tasks of verifiers in the library's own interpreter: what it rewards is what its tasks say, of what was sampled."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ptf
from ptf.errors import UserError
from ptf.rl.endpoint.agent_process import own_file
from ptf.rl.environments import verifiers_agent
from tests.conftest import ROOT
from tests.tiny import job_file

PYTHON = str(ROOT / ".venv-verifiers" / "bin" / "python")
ENV = {"taskset": {"id": "one_more"}}
with_verifiers = pytest.mark.skipif(not os.path.exists(PYTHON), reason="needs make .venv-verifiers/ready")


@pytest.fixture(autouse=True)
def tasksets(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("tasksets")))


def job(tmp_path: Path) -> str:
    rows = {"use": "ptf.rl.environments.verifiers_agent:prepare", "args": {"python": PYTHON, "env": ENV, "train": 8}}
    raw: dict[str, Any] = {
        "recipe": "grpo",
        "output": str(tmp_path / "out"),
        "model": {"path": "prepare:model", "init": "random"},
        "data": {
            "prepare": {"use": "ptf.tasks.with_model:prepare", "args": {"rows": rows}},
            "sources": {"tasks": {"path": "prepare:train.jsonl", "kind": "prompt"}},
            "seq_len": 256,
        },
        "rollout": {
            "harness": {
                "agent": {"use": "ptf.rl.environments.verifiers_agent:play", "args": {"env": ENV}},
                "python": PYTHON,
                "environment": [
                    name for name in ("SSL_CERT_FILE", "UV_INDEX_URL", "UV_CACHE_DIR") if name in os.environ
                ],
            },
            "engine": "native",
            "prompts_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 8,
        },
        "train": {"steps": 2, "lr": 1e-3, "precision": "fp32"},
        "compute": {"launcher": "local", "threads": 1},
    }
    return job_file(raw, tmp_path)


@pytest.mark.long
@with_verifiers
def test_an_episode_is_the_librarys_and_its_reward_too(tmp_path):
    (tmp_path / "answers.txt").write_text("1\n2\n3\n4\n")
    trial = ptf.try_episodes(ptf.load(job(tmp_path)), 4, policy=str(tmp_path / "answers.txt"))
    assert trial.no_result == []
    assert trial.repeatable
    for answer, episode in zip("1234", trial.episodes, strict=True):
        digit = int(episode.prompt.row["messages"][0]["content"].removesuffix("+1"))
        assert episode.reward == float(str(digit + 1) == answer)
        ((context, said, *_),) = episode.documents
        assert (context.sampled, said.sampled, said.text.removesuffix("<|im_end|>")) == (False, True, answer)
        assert f"{digit}+1" in context.text
    assert {episode.reward for episode in trial.episodes} == {0.0, 1.0}


@pytest.mark.long
@with_verifiers
def test_rows_have_the_question_alone_and_too_few_tasks_are_named(tmp_path):
    verifiers_agent.prepare(str(tmp_path), python=PYTHON, env=ENV, train=8, test=2)
    train, test = ((tmp_path / f"{name}.jsonl").read_text() for name in ("train", "test"))
    assert train.splitlines()[3] == '{"messages": [{"role": "user", "content": "3+1"}], "task": 3}'
    assert (train.count("\n"), test.count("\n")) == (8, 2)
    assert "answer" not in train
    with pytest.raises(UserError, match="the environment has 10 tasks: make `train`, 10, smaller"):
        verifiers_agent.prepare(str(tmp_path), python=PYTHON, env=ENV, train=10)
    with pytest.raises(UserError, match="no_such_taskset"):
        verifiers_agent.prepare(str(tmp_path), python=PYTHON, env={"taskset": {"id": "no_such_taskset"}})


def test_an_interpreter_without_the_library_is_named(tmp_path):
    with pytest.raises(UserError, match="No module named 'verifiers'"):
        verifiers_agent.prepare(str(tmp_path), python=sys.executable, env=ENV)


def test_a_module_of_ptf_is_read_from_its_file_where_ptf_is_not_installed(tmp_path):
    file = own_file("ptf.rl.environments.verifiers_agent:play")
    assert file == verifiers_agent.__file__
    assert own_file("json:loads") is None
    command = [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({file!r}, run_name='elsewhere')"]
    subprocess.run(command, check=True, cwd=tmp_path)  # it imports nothing but the standard library
