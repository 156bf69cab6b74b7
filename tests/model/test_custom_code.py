"""Python files beside a model or a tokenizer are never run, and nobody is asked whether they may be."""

import ast
import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import hf_backend
from ptf.model.verify import Reference

ROOT = Path(__file__).parents[2]
LOADS = ("from_pretrained", "from_config")
CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "mine"
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever sits there
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "code.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    (directory / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}})
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": [None, "code.Tokens"]}})
    )
    return directory


@pytest.mark.parametrize("load", [lambda d: Tokenizer.load(str(d)), hf_backend.configured])
def test_code_beside_a_model_is_refused_and_not_run(place, load):
    with pytest.raises(UserError, match="works only with the Python code in its directory"):
        load(place)
    assert not (place.parent / "ran").exists()


def test_the_verifier_does_not_run_it(place):
    with pytest.raises(UserError, match="model_type 'mine' is not supported"):
        Reference(place)
    assert not (place.parent / "ran").exists()


def test_the_control_with_a_yes_it_would_have_run(place):
    assert type(AutoConfig.from_pretrained(place)).__name__ == "Config"
    assert (place.parent / "ran").exists()


def test_every_load_by_transformers_says_so():
    seen = 0
    for file in [*ROOT.glob("ptf/**/*.py"), *ROOT.glob("steps/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOADS
                and ast.unparse(node.func.value) not in ("GenerationConfig", "nn.Embedding")
            ):
                value = {word.arg: word.value for word in node.keywords}.get("trust_remote_code")
                assert isinstance(value, ast.Constant), f"{file}:{node.lineno} leaves it to whoever sits there"
                assert value.value is False
                seen += 1
    assert seen >= 8
