"""Every way to write the line, and what Metaflow gets of it."""

import pytest

from flows.argv import Words, command, rewrite, sort
from ptf.config import load, loads
from ptf.errors import UserError
from tests.flows.toy import FLOW

TOY = FLOW.with_name("toy.yaml")


@pytest.mark.parametrize(
    ("line", "rest", "files", "overrides"),
    [
        ("run", "run", "", ""),
        ("run --config a.yaml", "run", "a.yaml", ""),
        ("run --config=a.yaml", "run", "a.yaml", ""),
        ("--config a.yaml run", "run", "a.yaml", ""),
        ("--config config a.yaml run", "run", "a.yaml", ""),
        ("run --config a.yaml b.yml", "run", "a.yaml b.yml", ""),
        ("run --config a.yaml --config b.yaml", "run", "a.yaml b.yaml", ""),
        ("--config a.yaml b.yaml run", "run", "a.yaml b.yaml", ""),
        ("run --config my.cfg --tag c.yaml", "run --tag c.yaml", "my.cfg", ""),
        ("run --set a.b=c --set d=e=f", "run", "", "a.b=c d=e=f"),
        ("--set=a.b=c run --set d=-1", "run", "", "a.b=c d=-1"),
        (
            "--quiet run --set a=1 --tag x --config a.yaml --max-workers 2",
            "--quiet run --tag x --max-workers 2",
            "a.yaml",
            "a=1",
        ),
        ("--config-value config kv.config step train", "--config-value config kv.config step train", "", ""),
        ("show", "show", "", ""),
    ],
)
def test_config_and_set_stand_anywhere(line, rest, files, overrides):
    assert sort(line.split()) == Words(tuple(rest.split()), tuple(files.split()), tuple(overrides.split()))


@pytest.mark.parametrize("line", ["run --config", "run --config --set a=b", "run --set", "--set --config a.yaml run"])
def test_an_option_without_its_value_is_told_so(line):
    with pytest.raises(UserError, match="needs a value"):
        sort(line.split())


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("run --tag resume", "run"),
        ("--no-pylint --datastore s3 resume --origin-run-id 1", "resume"),
        ("--quiet --metadata spin --datastore spin --datastore-root d spin-step train", "spin-step"),
        ("--quiet step train --tag run", "step"),
        ("--with retry argo-workflows create", "argo-workflows"),
        ("show", None),
        ("", None),
    ],
)
def test_the_command_is_found_among_options(line, verb):
    assert command(line.split()) == verb


def test_files_and_overrides_become_one_whole_config(tmp_path):
    longer = tmp_path / "longer.yaml"
    longer.write_text("train: {steps: 7}\n")
    line, note = rewrite(
        sort(["--quiet", "run", "--config", str(TOY), str(longer), "--set", "train.lr=5e-7"]), ("sft",), TOY
    )
    labels = ["--tag", "recipe:sft", "--tag", "model:some/model", "--tag", "data:chat"]
    assert line[:2] + line[3:] == ["--config-value", "config", "--quiet", "run", *labels]
    assert loads(line[2]) == load(TOY, longer, overrides=["train.lr=5e-7"])
    assert loads(line[2]).train.lr == 5e-7
    assert note == f"config: {TOY} + {longer} + train.lr=5e-7"


@pytest.mark.parametrize("line", ["run", "argo-workflows create", "airflow create dag.py"])
def test_what_launches_takes_the_default_and_says_so(line):
    words, note = rewrite(sort(line.split()), ("sft",), TOY)
    assert loads(words[2]) == load(TOY)
    assert note == f"config: {TOY}  (the flow's default)"


def test_overrides_alone_change_the_default():
    words, _ = rewrite(sort(["run", "--set", "train.steps=9"]), ("sft",), TOY)
    assert loads(words[2]) == load(TOY, overrides=["train.steps=9"])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "show",
        "--help",
        "resume",
        "spin train",
        "card list",
        "--config-value config {} run",
        "--config-value config kv.config step train",
    ],
)
def test_the_rest_is_left_alone(line, tmp_path):
    assert rewrite(sort(line.split()), ("sft",), tmp_path / "absent.yaml") == (line.split(), None)


@pytest.mark.parametrize("name", ["METAFLOW_FLOW_CONFIG", "METAFLOW_FLOW_CONFIG_VALUE"])
def test_a_config_in_the_environment_goes_before_the_default(monkeypatch, name, tmp_path):
    monkeypatch.setenv(name, "{}")
    assert rewrite(sort(["run"]), ("sft",), tmp_path / "absent.yaml") == (["run"], None)


def test_the_recipe_must_be_the_flows():
    with pytest.raises(UserError, match=r"toy\.yaml has recipe: sft; this flow runs recipe: grpo"):
        rewrite(sort(["run", "--config", str(TOY)]), ("grpo",), TOY)


def test_a_plugged_recipe_fits_every_flow():
    words, _ = rewrite(sort(["run", "--set", "recipe={use: 'my.own:Recipe'}"]), ("grpo",), TOY)
    assert loads(words[2]).recipe.use == "my.own:Recipe"
