"""What leaves a run says where responses end: to transformers' generation, and to its classifiers."""

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml
from transformers import GenerationConfig

from ptf import storage
from ptf.compute.world import World
from ptf.config import loads
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.tokenizer import Tokenizer
from ptf.data.tokenizer_files import write_tokenizer
from ptf.errors import UserError
from ptf.model import bridge, model_files, model_writer
from ptf.model.layers import LayerFactory
from ptf.model.reference import export_difference, head_difference
from ptf.train.export import export, probe_of
from ptf.train.export_settings import classifier_config
from ptf.train.job_tokenizer import is_rendered_otherwise
from ptf.training_run import raise_if_not_evaluated, record_evaluation
from tests.tiny import arithmetic, checkpoint, configured

CHATML = (
    "{% for m in messages %}{{ '<|im_start|><|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>' }}{% endif %}"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model whose files name `<|pad|>` as the end of a text, where its template ends turns with `<|im_end|>`."""
    tokenizer = character_tokenizer("0123456789+-=", tmp_path / "base")
    tokenizer.hf.eos_token = "<|pad|>"
    write_tokenizer(tokenizer.hf, tmp_path / "base")
    checkpoint(tmp_path / "base", eos_token_id=tokenizer.hf.eos_token_id)
    (tmp_path / "base" / "generation_config.json").unlink()
    return tmp_path / "base"


def exported(source: Path, head: Literal["lm", "scalar"] = "lm") -> Path:
    """Export the model in `source` as a run does."""
    model = bridge.load(source, head=head)
    if head == "scalar":
        torch.nn.init.normal_(model.get_parameter("head.weight"))
    directory = source.parent / "run" / "model"
    export(model, source, directory, World(), str(source))
    return directory


def test_transformers_stops_where_training_ended_turns(base: Path) -> None:
    trained = Tokenizer.load(str(base))
    end, eos = (trained.hf.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|pad|>"))
    model = exported(base)
    assert GenerationConfig.from_pretrained(model).eos_token_id == [end, eos]
    assert Tokenizer.load(str(model)).hf.eos_token_id == eos
    kept = probe_of(model.parent)
    assert export_difference(model, kept["tokens"], kept["logprobs"], trained.stop_ids) < 1e-4
    (model / "generation_config.json").unlink()
    with pytest.raises(UserError, match=rf"goes on after the ids \[{end}\]"):
        export_difference(model, kept["tokens"], kept["logprobs"], trained.stop_ids)


def test_settings_that_say_so_already_are_copied_as_they_are(base: Path) -> None:
    stops = list(reversed(Tokenizer.load(str(base)).stop_ids))
    text = json.dumps({"temperature": 0.7, "do_sample": True, "eos_token_id": stops})
    (base / "generation_config.json").write_text(text)
    model = exported(base)
    assert (model / "generation_config.json").read_text() == text
    kept = probe_of(model.parent)
    export_difference(model, kept["tokens"], kept["logprobs"], stops)


@pytest.mark.parametrize("place", ["eos_token_id", "text_config"])
def test_all_ends_that_config_json_names_count(base: Path, place: str) -> None:
    named = {place: [2, 0]} if place == "eos_token_id" else {place: {"eos_token_id": [2, 0]}}
    configured(base, **{"eos_token_id": None, **named})
    assert set(Tokenizer.load(str(base)).stop_ids) >= {2, 0}
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert not set(Tokenizer.load(str(base)).stop_ids) >= {2, 0}, "generation_config.json takes precedence"


def test_a_reward_model_is_padded_with_what_ends_no_response(base: Path) -> None:
    tokenizer = Tokenizer.load(str(base))
    tokenizer.hf.pad_token = tokenizer.hf.eos_token = "<|im_end|>"
    write_tokenizer(tokenizer.hf, base)
    ends = Tokenizer.load(str(base)).stop_ids
    model = exported(base, "scalar")
    config = model_files.read_config(model)
    published = Tokenizer.load(str(model))
    assert config["pad_token_id"] == published.hf.pad_token_id
    assert config["pad_token_id"] not in ends
    assert not tokenizer_changes(base, model)
    kept, own = probe_of(model.parent), LayerFactory()
    assert kept["tokens"][-1] == ends[0]
    assert head_difference(model, kept["tokens"], kept["values"], own) < 1e-4
    for pad in (ends[0], published.hf.pad_token_id - 1):  # of the config alone
        configured(model, pad_token_id=pad)
        assert head_difference(model, kept["tokens"], kept["values"], own) > 0.01


def test_a_reward_model_of_texts_without_an_end_is_read_at_their_last_token(base: Path) -> None:
    tokenizer = Tokenizer.load(str(base))
    tokenizer.hf.eos_token, tokenizer.hf.chat_template = None, "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_tokenizer(tokenizer.hf, base)
    configured(base, eos_token_id=None)
    assert not Tokenizer.load(str(base)).stop_ids
    model = exported(base, "scalar")
    kept = probe_of(model.parent)
    assert model_files.read_config(model)["pad_token_id"] not in kept["tokens"]
    assert head_difference(model, kept["tokens"], kept["values"], LayerFactory()) < 1e-4


def tokenizer_changes(before: Path, after: Path) -> set[str]:
    """Return what differs in the ids that two tokenizers give, but for the padding."""
    one, other = (Tokenizer.load(str(place)) for place in (before, after))
    return set(one.differences(other)) - {"special tokens"}


def test_a_reward_model_without_such_a_token_is_refused(base: Path) -> None:
    tokenizer = Tokenizer.load(str(base))
    special = [i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special]
    with pytest.raises(UserError, match=r"model\.tokens: \{added:"):
        classifier_config(base, Tokenizer(tokenizer.hf, special))


def test_named_templates_travel_and_each_is_compared(base: Path, tmp_path: Path) -> None:
    tokenizer, job = Tokenizer.load(str(base)), loads(yaml.safe_dump(arithmetic(tmp_path / "job")))
    assert not is_rendered_otherwise(job, str(base))
    named = {"default": CHATML, "tool_use": CHATML + "{{ strftime_now('%Y') }}"}
    tokenizer.hf.chat_template = named
    tokenizer.save(base)
    assert is_rendered_otherwise(job, str(base))
    served = Tokenizer.load(str(exported(base)))
    assert served.templates == named
    assert not served.differences(tokenizer)
    served.hf.chat_template = named | {"tool_use": CHATML}
    served._forget()
    assert served.differences(tokenizer) == ["chat template 'tool_use'"]


def test_another_tokenizer_brings_all_of_its_templates(base: Path, tmp_path: Path) -> None:
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "old.jinja").write_text("{{ 'old' }}")
    shutil.copytree(base, tmp_path / "source")
    shutil.rmtree(base / "additional_chat_templates")
    model = tmp_path / "copy"
    model_writer.save_hf(iter(()), tmp_path / "source", model, writes=True, tokenizer=str(base), carried=iter(()))
    assert Tokenizer.load(str(model)).templates.keys() == {"default"}


def test_saved_tokenizers_have_a_form_that_transformers_4_reads(base: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(base))
    tokenizer.add(["<a>", "<b>"], special=True)
    tokenizer.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|im_start|>" in config["additional_special_tokens"]
    assert not config.keys() & {"extra_special_tokens", "is_local", "local_files_only", "backend"}
    assert not Tokenizer.load(str(tmp_path / "saved")).differences(tokenizer)


def test_only_what_was_evaluated_is_compared(tmp_path: Path) -> None:
    def write(weights: bytes) -> None:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "model.safetensors").write_bytes(weights)
        storage.commit(tmp_path / "model", {})

    write(b"one")
    job = loads(yaml.safe_dump(arithmetic(tmp_path)))
    with pytest.raises(UserError, match=r"the run was not evaluated.* run ptf evaluate"):
        raise_if_not_evaluated(job, tmp_path)
    found = {"loss/held_out": 1.0, "starting_model/loss/held_out": 1.0}
    record_evaluation(tmp_path, found)
    raise_if_not_evaluated(job, tmp_path)
    sums = {"path": "p.jsonl", "kind": "prompt"}
    further = {"sources": {"sums": sums}, "reward": {"use": "ptf.tasks.arithmetic:exact"}}
    further_job = loads(yaml.safe_dump(arithmetic(tmp_path) | {"evaluate": further}))
    with pytest.raises(UserError, match="did not measure greedy_reward/sums, greedy_pass_rate/sums"):
        raise_if_not_evaluated(further_job, tmp_path)
    record_evaluation(tmp_path, {"loss/held_out": 1.0})
    with pytest.raises(UserError, match="did not measure starting_model/loss/held_out"):
        raise_if_not_evaluated(job, tmp_path)
    write(b"two")
    with pytest.raises(UserError, match="the evaluation was of an earlier model of this run"):
        raise_if_not_evaluated(job, tmp_path)
