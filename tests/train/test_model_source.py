"""The opening sequence that training, rollouts and evaluation share."""

from pathlib import Path

import pytest
import yaml

from ptf.compute.world import World
from ptf.config import Job, loads
from ptf.data.character_tokenizer import character_tokenizer
from ptf.errors import UserError
from ptf.model import model_files
from ptf.train.model_source import StartingModel
from tests.tiny import arithmetic


def job_of(tmp_path: Path, **model: object) -> Job:
    raw = arithmetic(tmp_path, rows=4)
    raw["model"] |= model
    return loads(yaml.safe_dump(raw))


def test_a_rank_of_a_gang_and_a_later_stage_open_the_same_model_with_the_added_tokens(tmp_path: Path) -> None:
    job, run = job_of(tmp_path, tokens={"added": ["<|new|>"]}), tmp_path / "run"
    located = model_files.locate(job.model.path)
    first = World().together(lambda: StartingModel.of_job(job, run, located))
    assert first.directory == run / "extended"
    assert first.section.init == "pretrained"
    assert len(first.load_tokenizer().encode("<|new|>")) == 1
    assert StartingModel.of_job(job, run) == first
    assert first.with_weights() == first, "it has weights already"


def test_random_weights_are_drawn_once(tmp_path: Path) -> None:
    plain, run = StartingModel.of_job(job_of(tmp_path), tmp_path / "run"), tmp_path / "run"
    assert not (run / "start").exists()
    adapted = StartingModel.of_job(job_of(tmp_path, lora={"rank": 2}), run).with_weights()
    assert (adapted.directory, adapted.section.init) == (run / "start", "pretrained")
    weights = (run / "start" / "model.safetensors").read_bytes()
    assert plain.with_weights().directory == run / "start"
    assert (run / "start" / "model.safetensors").read_bytes() == weights


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    character_tokenizer("0123456789+-=abcdefgh", tmp_path / "larger")
    starting = StartingModel.of_job(job_of(tmp_path, tokenizer=str(tmp_path / "larger")), tmp_path / "run")
    with pytest.raises(UserError, match=r"the tokenizer in .*larger has ids up to \d+, but the model"):
        starting.load_tokenizer()
