"""`ptf check` reports paths at which there is nothing, each at its line, together with every other problem."""

from pathlib import Path

import pytest

from ptf import api, cli
from ptf.config.tree import merge
from ptf.errors import UserError
from ptf.inspection.places import missing
from tests.tiny import write_jsonl

CONFIG = """
recipe: {use: "no_such_module:Recipe"}
model: {path: ./models/absent}
data:
  sources:
    a: {path: absent.jsonl, kind: chat}
rollout:
  reward:
    use: "ptf.rl.rewards.functions:exact"
    args: {colunm: answer}
train: {steps: 3, lr: 1e-4}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(text: str) -> list[str]:
    Path("job.yaml").write_text(text)
    return [f"{p.place.line} {p.key}" for p in missing(merge("job.yaml").root)]


def test_one_check_reports_four_kinds_with_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(CONFIG)
    assert cli.main(["check", "job.yaml"]) == 2
    said = capsys.readouterr().err
    for part in (
        "job.yaml:2  recipe.use",
        "job.yaml:3  model.path  there is no model directory ./models/absent",
        "job.yaml:6  data.sources.a.path  there is no absent.jsonl",
        "job.yaml:10  rollout.reward.args.colunm",
        "did you mean column?",
    ):
        assert part in said
    assert cli.main(["check", "--skip-paths", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert "no_such_module" in said
    assert "absent.jsonl" not in said
    assert "model directory" not in said


def test_every_key_that_names_a_path_is_looked_at() -> None:
    assert found(
        """model: {path: ./m, tokenizer: ./t}
data:
  sources: {a: {path: a/*.jsonl}}
  validation: {b: {path: "file://b.jsonl"}}
evaluate:
  sources: {c: {path: c}}
rollout: {reward_model: {path: ./r}}
algo:
  teachers: {d: {path: ./d}}
"""
    ) == [
        "3 data.sources.a.path",
        "4 data.validation.b.path",
        "6 evaluate.sources.c.path",
        "1 model.path",
        "1 model.tokenizer",
        "7 rollout.reward_model.path",
        "9 algo.teachers.d.path",
    ]


def test_what_this_machine_cannot_know_is_not_reported() -> None:
    assert not found(
        """model: {path: owner/name, tokenizer: "s3://bucket/t"}
data:
  sources: {a: {path: "prepare:a"}, b: {path: "s3://bucket/b"}, c: {path: "hf://owner/set:main:train"}}
rollout: {reward_model: {path: "job:latest"}}
"""
    )
    Path("owner").mkdir()  # now `owner/name` is a directory's name
    assert found("model: {path: owner/name}") == ["1 model.path"]


def test_what_is_there_is_not_reported() -> None:
    write_jsonl(Path("rows-0.jsonl"), [{"text": "a"}])
    Path("m").mkdir()
    text = "recipe: sft\nmodel: {path: m}\ntrain: {steps: 3, lr: 1e-4, warmup_steps: 0}\n"
    text += "data: {sources: {a: {path: 'rows-*.jsonl', kind: text}}}\n"
    assert not found(text)
    job = api.load("job.yaml")
    Path("rows-0.jsonl").unlink()
    with pytest.raises(UserError, match=r"there is no rows-\*\.jsonl"):
        api.check(job)


def test_the_programs_of_a_harness_are_looked_for() -> None:
    assert found("rollout: {harness: {agent: {use: a:b}, python: ./python}}\n") == ["1 rollout.harness.python"]
    assert found("rollout: {harness:\n  {command: [no-such-program, a]}}\n") == ["2 rollout.harness.command"]
    Path("agent").write_text("#!/bin/sh\n")
    assert found("rollout: {harness: {command: [./agent]}}\n") == ["1 rollout.harness.command"], "it cannot be run"
    Path("agent").chmod(0o755)
    assert found("rollout: {harness: {command: [./agent]}}\n") == []
    assert found("rollout: {harness: {command: [sh, -c, x]}}\n") == []
    assert found("rollout: {harness: {command: [], python: 3}}\n") == []
