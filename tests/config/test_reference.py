import json
from pathlib import Path

import pytest

from ptf.config import dump, loads, reference
from ptf.config.explain import keys
from ptf.config.reference import MOST_SET, json_schema, markdown
from ptf.config.schema import jobs

ROOT = Path(__file__).parents[2]
GRPO = (
    "{recipe: grpo, model: {path: m}, data: {sources: {a: {path: a, kind: prompt}}}, train: {steps: 1, lr: 1e-4}, "
    "rollout: {reward: {use: a:b}}}"
)


def test_generated_files_are_current():
    again = "run `python -m ptf.config.reference`"
    assert (ROOT / "docs/config.md").read_text() == markdown(), again
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    assert (ROOT / "configs/schema.json").read_text() == schema, again


def test_every_key_has_a_row_and_a_description():
    text = markdown()
    for job in jobs().values():
        for key, _ in keys(job):
            assert f"| `{key.rpartition('.')[2]}` |" in text, key
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row for row in rows if not row.split("|")[-2].strip()] == [], "without a docstring"


def test_keys_that_may_change_are_marked():
    rows = {line.split("|")[1].strip(): line for line in markdown().splitlines() if line.startswith("| `")}
    assert "| may change |" in rows["`micro_batch_sequences`"]
    assert "| may change |" in rows["`retries`"]  # below a key that may change
    assert "| fixed |" in rows["`lr`"]


def test_the_page_begins_with_thirty_keys_that_exist(monkeypatch):
    assert len(MOST_SET) == len(set(MOST_SET)) == 30
    first = markdown().split("\n## ")[1]
    assert [line.split("`")[1] for line in first.splitlines() if line.startswith("| `")] == list(MOST_SET)
    for key in MOST_SET:
        assert any(key in {name for name, _ in keys(job)} for job in jobs().values()), key
    monkeypatch.setattr(reference, "MOST_SET", ("train.learning_rate",))  # the control: a key that no job has
    with pytest.raises(KeyError):
        markdown()


def test_keys_of_the_first_table_are_told_as_in_their_sections():
    _, first, *sections = markdown().split("\n## ")
    below = {
        f"{part.splitlines()[0]}.{line.split('`')[1]}": line
        for part in sections
        for line in part.splitlines()
        if line.startswith("| `")
    }
    for line in (line for line in first.splitlines() if line.startswith("| `")):
        key = line.split("`")[1]
        assert line.replace(f"`{key}`", f"`{key.rpartition('.')[2]}`", 1) == below[key if "." in key else f"Job.{key}"]


def test_json_schema_takes_what_the_loader_takes():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(json_schema())
    whole = loads(GRPO).model_dump(mode="json")
    check.validate(whole)
    check.validate({"extends": "base.yaml", "compute": {"workers": 2}})  # a part of a config
    check.validate({"recipe": "sft", "algo": {}})
    for wrong in (
        {"trian": {}},
        {"train": {"steps": 0}},
        {"recipe": "sft", "algo": {"kl_coef": 1.0}},
        {"recipe": "grop"},
        {"train": {"lr": "1e-4"}},
    ):
        assert not check.is_valid(wrong), wrong
    assert json.loads(json.dumps(json_schema())) == json_schema()
    assert dump(loads(GRPO))
