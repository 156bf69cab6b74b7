"""ptf scaffold: its first version of a family passes the verifier, or says why it does not."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from ptf import cli
from ptf.errors import UserError
from ptf.model import families
from ptf.model.families import family_of
from ptf.model.scaffold import draft as drafts
from ptf.model.scaffold import registration
from ptf.model.scaffold.reference import reference_of
from ptf.model.scaffold.structure import measure
from ptf.model.scaffold.tensors import tensor_plan


def drafted(name: str) -> drafts.Draft:
    return drafts.draft(reference_of(name))


@pytest.mark.parametrize(
    "name",
    ["qwen3", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3_moe", "olmo2", "gemma2", "cwm", "exaone4"))],
)
def test_a_draft_from_transformers_alone_passes(name):
    before = list(families.MODULES.items())
    draft = drafted(name)
    report = drafts.check(name, draft.text, 3)
    assert report.passed, [(c.logits, c.gradients, c.problems) for c in report.cases]
    assert before == list(families.MODULES.items()), "a draft is a family only while it is compared"
    assert draft.findings.nearest != name
    assert not draft.findings.unmapped


def test_a_setting_that_is_not_read_is_refused_by_name():
    draft = drafted("qwen3")
    with registration.provisional("qwen3", draft.text):
        family = family_of({"model_type": "qwen3"})
        c = AutoConfig.for_model("qwen3").to_dict()
        family.config(c)
        with pytest.raises(UserError, match=r"qwen3: not supported: attention_dropout: 0\.1"):
            family.config({**c, "attention_dropout": 0.1})
    assert draft.findings.unread["attention_dropout"].startswith("0.0")


def test_what_cannot_be_mapped_is_reported(tmp_path, capsys):
    file = tmp_path / "starcoder2.py"
    assert cli.main(["scaffold", "starcoder2", "--output", str(file), "--configs", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert file.is_file()
    assert not found["registered"]
    lost = {one["name"]: (one["shape"], one["module"]) for one in found["unmapped"]}
    assert lost["model.layers.{i}.input_layernorm.bias"] == ([96], "LayerNorm")
    assert any("LayerNorm" in reason for reason in found["reasons"])
    assert any("without a gate" in reason for reason in found["reasons"])
    assert not found["check"]["passed"]
    assert found["check"]["cases"][0]["problems"]


def test_a_parameter_that_no_family_has_is_not_guessed():
    reference = reference_of("starcoder2")
    reference.shapes["model.layers.0.self_attn.novel.weight"] = (7, 7)
    plan = tensor_plan(reference, measure(reference))
    assert plan.unmapped["model.layers.{i}.self_attn.novel.weight"] == (7, 7)


def test_nothing_is_overwritten(tmp_path, capsys):
    file = tmp_path / "llama.py"
    file.write_text("mine")
    assert cli.main(["scaffold", "llama", "--output", str(file)]) == 2
    assert "exists; --force replaces it" in capsys.readouterr().err.replace("\n", " ")
    assert file.read_text() == "mine"
    assert cli.main(["scaffold", "llama"]) == 2, "a family of ptf"
    assert cli.main(["scaffold", "glm4_moe_lite"]) == 2, "a family in another file"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("olmo22", "transformers has no model_type 'olmo22'; nearest: olmo2"),
        ("gemma3", "wraps a language model in text_config: scaffold that, gemma3_text"),
        ("vit", "transformers has no causal language model of vit"),
    ],
)
def test_a_wrong_name_is_status_2(name, message, capsys):
    assert cli.main(["scaffold", name]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_directory_is_read_for_its_settings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "attention_dropout": 0.1}))
    reference = reference_of(str(tmp_path))
    assert reference.model_type == "llama"
    assert reference.default("attention_dropout") == 0.1
    assert reference.default("hidden_act") == "silu"
    draft = drafts.draft(reference)
    assert drafts.check("llama", draft.text, 1).passed
    with registration.provisional("llama", draft.text):
        family = family_of({"model_type": "llama"})
        c = {k: v for k, v in AutoConfig.for_model("llama").to_dict().items() if k != "attention_dropout"}
        family.config({**c, "attention_dropout": 0.1})
        with pytest.raises(UserError, match=r"attention_dropout: 0\.0"):
            family.config(c)  # what transformers has without the key is another model


def test_registering_twice_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "MODULES", dict(families.MODULES))
    registry = tmp_path / "__init__.py"
    registry.write_text(Path(families.__file__).read_text())
    assert registration.register("novel", Path("novel.py"), registry)
    once = registry.read_text()
    assert '    "novel": "novel",\n}\n' in once
    assert not registration.register("novel", Path("novel.py"), registry)
    assert registry.read_text() == once
