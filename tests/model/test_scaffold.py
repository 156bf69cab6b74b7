"""ptf scaffold: its first version of a family passes the verifier, or says why it does not."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from ptf import cli
from ptf.errors import UserError
from ptf.model import families
from ptf.model.families import family_of
from ptf.model.scaffold import draft as drafts
from ptf.model.scaffold import nearest, registration, tensors
from ptf.model.scaffold.check import check
from ptf.model.scaffold.effects import LOGITS, NONE, effect, of_the_rule
from ptf.model.scaffold.reference import reference_of
from ptf.model.scaffold.structure import measure
from ptf.model.scaffold.tensors import tensor_plan
from tests.model.published_configs import PUBLISHED


def drafted(name: str) -> drafts.Draft:
    return drafts.draft(reference_of(name))


@pytest.mark.parametrize(
    "name",
    ["qwen3", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3_moe", "olmo2", "gemma2", "cwm", "exaone4"))],
)
def test_a_draft_from_transformers_alone_passes(name):
    before = list(families.MODULES.items())
    draft = drafted(name)
    report = check(draft.reference, draft.text, 3)
    assert report.passed, report.cases
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


def test_a_model_without_a_list_of_layers_is_refused():
    reference = reference_of("qwen3")
    assert reference.layer(0) is not reference.layer(1)
    with pytest.raises(UserError, match="qwen3: transformers' model has no list of layers"):
        replace(reference, model=nn.Linear(1, 1)).layer(0)


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


def directory_of(place: Path, config: dict[str, Any]) -> str:
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def test_a_directory_is_read_for_its_settings(tmp_path):
    reference = reference_of(directory_of(tmp_path, {"model_type": "llama", "attention_dropout": 0.1}))
    assert reference.model_type == "llama"
    assert reference.default("attention_dropout") == 0.1
    assert reference.default("hidden_act") == "silu"
    draft = drafts.draft(reference)
    report = check(reference, draft.text, 1)
    assert report.passed
    assert report.cases[-1].config["attention_dropout"] == 0.1, "the directory's own settings"
    with registration.provisional("llama", draft.text):
        family = family_of({"model_type": "llama"})
        c = {k: v for k, v in AutoConfig.for_model("llama").to_dict().items() if k != "attention_dropout"}
        family.config({**c, "attention_dropout": 0.1})
        family.config(c)  # with what transformers has without the key, the logits are the same
        with pytest.raises(UserError, match=r"attention_dropout: 0\.2"):
            family.config({**c, "attention_dropout": 0.2})


def test_a_setting_that_matters_is_refused_where_the_directory_has_another_value(tmp_path):
    draft = drafted(directory_of(tmp_path, {"model_type": "olmoe", "clip_qkv": 0.5}))
    with registration.provisional("olmoe", draft.text):
        family = family_of({"model_type": "olmoe"})
        c = {k: v for k, v in AutoConfig.for_model("olmoe").to_dict().items() if k != "clip_qkv"}
        family.config({**c, "clip_qkv": 0.5})
        with pytest.raises(UserError, match="clip_qkv: None"):
            family.config(c)  # what transformers has without the key is another model
    assert "without the key it is None, which is refused" in draft.findings.unread["clip_qkv"]


@pytest.mark.parametrize("name", ["EXAONE-4.0-1.2B", "EXAONE-4.0-32B"])
@pytest.mark.parametrize("of_a_directory", [False, True])
def test_what_counts_only_without_layer_types_is_accepted_with_them(name, of_a_directory, tmp_path):
    published = PUBLISHED[name][0]
    draft = drafted(directory_of(tmp_path, published) if of_a_directory else "exaone4")
    assert "counts only without layer_types" in draft.findings.unread["sliding_window_pattern"]
    with registration.provisional("exaone4", draft.text):
        family = family_of({"model_type": "exaone4"})
        family.config(published)
        family.config(AutoConfig.for_model(**published).to_dict())  # as transformers saves it again
        rest = {k: v for k, v in PUBLISHED["EXAONE-4.0-32B"][0].items() if k != "layer_types"}
        family.config({**rest, "sliding_window_pattern": 4})
        with pytest.raises(UserError, match="sliding_window_pattern: 2"):
            family.config({**rest, "sliding_window_pattern": 2})
        drawn = [family.random_config(random.Random(number)) for number in range(50)]
    if of_a_directory:
        report = check(draft.reference, draft.text, 2)
        assert report.passed, [c.problems for c in report.cases]
        assert report.cases[-1].config["layer_types"] == published["layer_types"][:4]
        assert published["sliding_window_pattern"] in [c.get("sliding_window_pattern", 4) for c in drawn]
    assert None in [c["sliding_window"] for c in drawn]
    assert {"head_dim" in c for c in drawn} == {True, False}
    assert not [key for c in drawn for key in c if key.endswith("_token_id")]


@pytest.mark.parametrize("name", ["exaone4", "qwen2"])
def test_with_layer_types_the_rule_of_them_changes_no_logit(name):
    """The negative control is that without them it does."""
    reference = reference_of(name)
    key = {"exaone4": "sliding_window_pattern", "qwen2": "max_window_layers"}[name]
    ((found, switch),) = of_the_rule(reference, [key])
    assert (found, switch) == (key, {"exaone4": "", "qwen2": "use_sliding_window"}[name])
    on = {switch: True} if switch else {}
    types = ["sliding_attention", "full_attention"] * 2
    assert effect(reference, {**on, key: 4}, {**on, key: 2}) == LOGITS
    assert effect(reference, {**on, key: 4, "layer_types": types}, {**on, key: 2, "layer_types": types}) == NONE
    assert not list(of_the_rule(reference, ["attention_dropout", "rms_norm_eps"]))


def test_what_a_refused_switch_alone_makes_count_is_not_refused():
    """Published Qwen2 models have other values of max_window_layers, and no window."""
    draft = drafted("qwen2")
    with registration.provisional("qwen2", draft.text):
        family = family_of({"model_type": "qwen2"})
        c = {k: v for k, v in AutoConfig.for_model("qwen2").to_dict().items() if k != "layer_types"}
        family.config({**c, "max_window_layers": 21})
        with pytest.raises(UserError, match="layer_types"):
            family.config({**c, "max_window_layers": 21, "use_sliding_window": True})


@pytest.mark.parametrize(("name", "family"), [("exaone4", "olmo2"), ("qwen3_moe", "qwen2_moe"), ("flex_olmo", "olmo2")])
def test_the_nearest_family_is_one_from_whose_classes_transformers_derives(name, family):
    reference = reference_of(name)
    plan = tensor_plan(reference, measure(reference))
    assert nearest.nearest_family(reference, {ours for _, names, _ in plan.found for ours in names}) == family


def test_an_error_says_whose_it_is():
    draft = drafted("exaone4")
    wrong = draft.text.replace("    table = rope(c)\n", '    table = rope(c, theta="x")\n    1 + "a"\n')
    assert wrong != draft.text
    (case,) = check(draft.reference, wrong, 1).cases
    assert case.problems[0].startswith("TypeError: unsupported operand type(s)")
    line = wrong[: wrong.index('1 + "a"')].count("\n") + 1
    assert case.problems[0].endswith(f"(raised in the family's config(), line {line})")
    wrong = draft.text.replace(
        '"exaone4",\n        sliding', '"exaone4",\n        sliding_window_pattern="LG",\n        sliding'
    )
    assert wrong != draft.text
    (case,) = [c for c in check(draft.reference, wrong, 12).cases if not c.passed]
    assert "(raised in transformers, models/exaone4/configuration_exaone4.py line" in case.problems[0]
    wrong = draft.text.replace("rope(c)", 'rope(c, {"rope_theta": "wide"})')
    (case,) = check(draft.reference, wrong, 1).cases
    assert "(raised in ptf, model/families/__init__.py line" in case.problems[0]
    assert ", from the family's config(), line" in case.problems[0]


def test_registering_twice_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "MODULES", dict(families.MODULES))
    registry = tmp_path / "__init__.py"
    registry.write_text(Path(families.__file__).read_text())
    assert registration.register("novel", Path("novel.py"), registry)
    once = registry.read_text()
    assert '    "novel": "novel",\n}\n' in once
    assert not registration.register("novel", Path("novel.py"), registry)
    assert registry.read_text() == once


@pytest.mark.parametrize("inner", ["q_a_proj.weight", "kv_b_proj.weight", "kv_a_layernorm.weight", "q_a_proj.bias"])
def test_projections_of_latent_attention_are_mapped_where_the_config_has_some(inner):
    settings = {"num_attention_heads": 2, "hidden_size": 32, "kv_lora_rank": 8}
    kind, ours = tensors._attention(inner, (8, 32), settings)
    assert (kind, ours) == ("Rename", ("layers.{i}.attn." + inner.replace("layernorm", "norm"),))
    del settings["kv_lora_rank"]
    assert tensors._attention(inner, (8, 32), settings) is None


def test_classes_that_differ_in_words_alone_are_the_same(tmp_path, monkeypatch):
    """Docstrings, comments, types and the model's name are left out; a first statement is not."""
    body = "    {doc}\n    def forward(self, x{types}):\n        {inner}\n        y = x + 1\n        return y{more}\n"
    tail = "class {name}ForCausalLM:\n    pass\n"

    def lines(name, doc, types, inner, more):
        text = f"class {name}MLP:\n" + body.format(doc=doc, types=types, inner=inner, more=more)
        (tmp_path / f"words_{name.lower()}.py").write_text(text + tail.format(name=name))
        return nearest._sources(f"words_{name.lower()}")["MLP"]

    monkeypatch.syspath_prepend(str(tmp_path))
    plain = lines("Ant", "pass", "", "x = x", "")
    assert plain == lines("Bee", "pass", ": int", "x = x  # itself", "  # the sum")
    assert "y = x + 1" in "".join(plain)
    assert any("x = x" in line for line in plain), "the first statement stays where there is no docstring"
    assert not any("Words" in line for line in lines("Dog", '"""Words."""', "", '"""Words."""', ""))
