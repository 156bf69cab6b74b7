import json
import sys
from types import SimpleNamespace

import pytest

from ptf import cli
from ptf.config import load, loads
from ptf.errors import UserError
from tests.child import run_python
from tests.model.mistakes import MISTAKES
from tests.tiny import checkpoint

SFT = "recipe: sft\nmodel: {path: m}\ndata: {sources: {chat: {path: a.jsonl}}}\ntrain: {steps: 10, lr: 1e-4}\n"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(SFT)
    (tmp_path / "b.yaml").write_text("train: {steps: 20}\n")


def test_check_prints_the_whole_job(capsys):
    keys = ["seed=3", "train.warmup_steps=2", "train.precision=fp32"]  # what auto stands for depends on the machine
    assert cli.main(["check", "--skip-paths", "a.yaml", "b.yaml", *(f"--set={key}" for key in keys)]) == 0
    out, err = capsys.readouterr()
    assert loads(out) == load("a.yaml", "b.yaml", overrides=keys)
    # no data and no network: still a line, at once
    assert err.startswith("check: not on this machine, so not looked at: data.sources.chat (a.jsonl)")


def test_check_prints_every_problem_and_no_traceback(capsys):
    sets = ["trian.lr=1", "train.steps=0", "model.path=[bold]", "track.x" + "x" * 300 + "=1"]
    assert cli.main(["check", "--skip-paths", "a.yaml", *(f"--set={one}" for one in sets)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  ")[0][:20] for line in err.splitlines()] == [
        "--set model.path=[bo",
        "--set track.xxxxxxxx",
        "--set train.steps=0",
        "--set trian.lr=1",
    ]
    assert "did you mean train?" in err
    assert "Traceback" not in err


def test_train_hands_the_job_over(monkeypatch):
    seen = {}
    monkeypatch.setitem(
        sys.modules,
        "ptf.training_run",
        SimpleNamespace(train=lambda job, run_name: seen.update(job=job, run_name=run_name)),
    )
    assert cli.main(["train", "a.yaml", "--set", "train.lr=2e-4", "--run-name", "x1"]) == 0
    assert seen == {"job": load("a.yaml", overrides=["train.lr=2e-4"]), "run_name": "x1"}
    assert cli.main(["train", "a.yaml"]) == 0
    assert seen["run_name"] is None


@pytest.mark.parametrize(("error", "status"), [(UserError("[bold] no such [thing]"), 2), (ValueError("our bug"), None)])
def test_only_user_errors_lose_their_traceback(monkeypatch, capsys, error, status):
    def train(*_):
        raise error

    monkeypatch.setitem(sys.modules, "ptf.training_run", SimpleNamespace(train=train))
    if status is None:
        with pytest.raises(ValueError, match="our bug"):
            cli.main(["train", "a.yaml"])
    else:
        assert cli.main(["train", "a.yaml"]) == status
        assert capsys.readouterr().err == "[bold] no such [thing]\n"


def test_verify_passes_a_family_and_fails_a_mistake(capsys, monkeypatch):
    assert cli.main(["check-model", "llama", "--configs", "2", "--seed", "3", "--no-parallel"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "llama: pass"
    words = ("error of transformers", "error of ptf", "tolerance", "random tokens", "gradient of model.layers.")
    assert all(word in out for word in words)
    assert err == ""
    with next(m for m in MISTAKES if m.name == "gate and up swapped").made():
        assert cli.main(["check-model", "llama", "--configs", "1", "--no-parallel"]) == 1
        out, _ = capsys.readouterr()
        assert out.splitlines()[-1] == "llama: fail"
        assert "layer 0, mlp" in out
        assert cli.main(["check-model", "llama", "--configs", "1", "--json", "--no-parallel"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], len(report["cases"]), report["cases"][0]["config"]["model_type"]) == (False, 1, "llama")


@pytest.mark.long
def test_verify_runs_a_family_on_two_ranks(capsys):
    assert cli.main(["check-model", "olmo2", "--configs", "1"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "what was saved" in line] == ["FSDP", "tensor"]
    assert cli.main(["check-model", "olmo2", "--configs", "1", "--json"]) == 0
    assert [case["mesh"] for case in json.loads(capsys.readouterr().out)["cases"]] == ["", "FSDP", "tensor parallel"]


def test_verify_takes_a_directory(tmp_path, capsys):
    directory = checkpoint(tmp_path / "model")
    capsys.readouterr()
    assert cli.main(["check-model", str(directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{directory}: pass"
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert cli.main(["check-model", str(directory)]) == 2
    assert "model.safetensors cannot be read" in capsys.readouterr().err


def test_verify_refuses_what_is_neither_with_one_message(capsys):
    assert cli.main(["check-model", "lama"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lama is neither a directory with a config.json nor a family: llama, ")
    assert len(err.splitlines()) == 1
    with pytest.raises(SystemExit) as stop:
        cli.main(["check-model", "llama", "--configs", "0"])
    assert stop.value.code == 2


def test_a_wrong_command_line_is_status_2(capsys):
    for argv in ([], ["chek", "a.yaml"], ["check"], ["check", "a.yaml", "--sett", "x"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 2
    assert "usage: ptf" in capsys.readouterr().err


def test_a_run_that_is_to_be_continued_must_be_there(capsys, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(
        f"recipe: sft\noutput: {tmp_path}/runs\nmodel: {{path: m}}\ndata: {{sources: {{a: {{path: a.jsonl}}}}}}\n"
        "train: {steps: 1, lr: 1e-4}\n"
    )
    for other in ("frist-2", "fris", "frist-first"):  # names that only begin alike
        (tmp_path / "runs" / other).mkdir(parents=True)
        (tmp_path / "runs" / other / "job.yaml").write_text("# of another run")
    (tmp_path / "runs" / "frist").mkdir()
    assert cli.main(["train", str(job), "--continue", "frist"]) == 2
    assert f"--continue frist: {tmp_path}/runs has no run of this name" in capsys.readouterr().err.replace("\n", "")
    with pytest.raises(SystemExit):
        cli.main(["train", str(job), "--continue", "a", "--run-name", "a"])


def test_the_console_script_exits_with_the_status():
    run = run_python("-c", "import sys; from ptf.cli import main; sys.exit(main())", "check", "nope.yaml")
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "nope.yaml  cannot read the config file: no such file\n")
