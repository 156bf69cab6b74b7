"""What a user gets wrong: one clear message, a status that is not 0, no traceback, nothing half-written.
Through the console script's entry."""

from pathlib import Path

import pytest
import yaml

from ptf.cli import main
from ptf.config import load, loads
from ptf.config.recipes import RECIPES
from ptf.run import flow_of
from tests.conftest import ROOT
from tests.tiny import arithmetic, configured, job_file, write_jsonl


@pytest.fixture
def raw(tmp_path):
    return arithmetic(tmp_path)


def told(raw: dict, tmp_path: Path, capfd) -> str:
    """What `ptf train` says about this job; it must refuse it."""
    status = main(["train", job_file(raw, tmp_path), "--run-name", "a"])
    said = capfd.readouterr()
    assert status == 2
    assert "Traceback" not in said.out + said.err
    left = {p.name for p in Path(raw["output"]).rglob("*") if p.is_file() and p.stat().st_size}
    assert left <= {"job.yaml", "lease.json"}, left  # the latter says that nobody holds the run
    return said.err.strip()


def test_a_missing_data_path(raw, tmp_path, capfd):
    raw["data"]["sources"]["sums"]["path"] = str(tmp_path / "absent.jsonl")
    assert "absent.jsonl" in told(raw, tmp_path, capfd)


def test_empty_data(raw, tmp_path, capfd):
    (tmp_path / "train.jsonl").write_text("")
    message = told(raw, tmp_path, capfd)
    assert "train.jsonl" in message
    assert len(message.splitlines()) == 1


def test_a_malformed_row_is_named_with_file_and_line(raw, tmp_path, capfd):
    good = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*good[:6], '{"messages": [', *good[6:]]) + "\n")
    assert "train.jsonl:7" in told(raw, tmp_path, capfd)


def test_a_row_without_messages_is_named_with_file_and_line(raw, tmp_path, capfd):
    write_jsonl(
        tmp_path / "train.jsonl",
        [{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}, {"text": "1+1=2"}],
    )
    message = told(raw, tmp_path, capfd)
    assert "train.jsonl:2" in message
    assert "messages" in message


def test_a_model_directory_without_config(raw, tmp_path, capfd):
    (tmp_path / "model" / "config.json").unlink()
    assert "no config.json" in told(raw, tmp_path, capfd)


def test_a_model_that_does_not_exist(raw, tmp_path, capfd):
    raw["model"]["path"] = str(tmp_path / "nowhere")
    assert "nowhere" in told(raw, tmp_path, capfd)


def test_a_model_of_an_unknown_family(raw, tmp_path, capfd):
    configured(tmp_path / "model", model_type="qwen9_next")
    message = told(raw, tmp_path, capfd)
    assert "qwen9_next" in message
    assert "qwen3" in message


def test_a_job_that_nothing_was_published_by(raw, tmp_path, capfd):
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**raw, "output": str(tmp_path / "other")}))
    raw["model"] = {"path": f"job:{other}"}
    message = told(raw, tmp_path, capfd)
    assert "has published no model yet" in message
    assert f"python flows/sft_flow.py run --config {other}" in message


def test_every_recipe_has_a_flow_which_messages_name(raw, tmp_path):
    """Of a plugin recipe, which runs in every flow, the message names one that exists."""
    for recipe in RECIPES:
        assert f'recipes = ("{recipe}",)' in (ROOT / "flows" / f"{recipe}_flow.py").read_text()
    for config in sorted((ROOT / "configs" / "tiny").glob("*.yaml")):
        job = load(config)
        assert flow_of(job) == job.recipe
    plugin = {**raw, "recipe": {"use": "ptf.recipes.sft.recipe:SFT"}, "algo": {}}
    assert flow_of(loads(yaml.safe_dump(plugin))) == "sft"


def test_a_plug_that_does_not_exist(raw, tmp_path, capfd):
    raw["data"]["prepare"] = {"use": "ptf.tasks.arithmetic:prepar"}
    message = told(raw, tmp_path, capfd)
    assert "prepar" in message
    assert "prepare" in message


def test_a_control_that_is_accepted(raw, tmp_path, capfd):
    """Negative control: the same job without a fault trains."""
    raw["train"]["steps"] = 1
    assert main(["train", job_file(raw, tmp_path), "--run-name", "a"]) == 0
