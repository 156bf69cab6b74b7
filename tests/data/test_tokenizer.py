import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.probes import PROBES
from ptf.data.tokenizer import Tokenizer
from ptf.data.tokenizer_files import PLAIN_CLASSES, PLAIN_FAMILIES, tokenizer_class
from ptf.errors import UserError
from tests.child import run_python
from tests.data.templates import OWN, templated

HEAVY = ["transformers.generation.utils", "sklearn", "torch._dynamo"]
CHAT = [{"role": "user", "content": "12+7="}, {"role": "assistant", "content": "19"}]


@given(st.text("abcdefghijklmnopqrstuvwxyz0123456789 .,+-="))
def test_one_id_a_character_and_back(characters: Tokenizer, text: str) -> None:
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text


TEXTS = st.text() | st.lists(st.sampled_from([*PROBES, "<|im_end|>", "<|im_start|>user\n", "a"])).map("".join)


@given(st.lists(TEXTS, max_size=4))
@pytest.mark.parametrize("name", ["plain", "two_stops"])
def test_texts_become_the_ids_of_the_class(name: str, texts: list[str]) -> None:
    tokenizer = templated(name)
    assert tokenizer._is_plain
    assert tokenizer.encode_all(texts) == [tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", OWN)
def test_texts_become_the_ids_of_the_class_with_real_tokenizers(name: str, shared: Path) -> None:
    tokenizer = templated(name, shared)
    texts = [*PROBES, *("".join(PROBES[n:]) for n in range(len(PROBES)))]
    assert tokenizer.encode_all(texts) == [tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_what_a_file_says_of_truncation_and_padding_changes_no_ids(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    cutting = Tokenizer.load(str(tmp_path))
    backend = cutting.hf.backend_tokenizer
    assert cutting._is_plain  # found before the file says otherwise
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    assert len(backend.encode_batch_fast(["12+7=19"], add_special_tokens=False)[0].ids) == 9  # it would change them
    assert cutting.encode_all(["12+7=19", "1"]) == characters.encode_all(["12+7=19", "1"])
    backend.encode_special_tokens = True
    assert cutting.encode("<|im_end|>") == characters.encode("<|im_end|>")


def test_a_class_that_changes_texts_is_followed(characters: Tokenizer) -> None:
    class Lower(type(characters.hf)):
        def _encode_plus(self, text: list[str], *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus([t.lower() for t in text], *args, **kwargs)

    lower = Tokenizer(Lower.from_pretrained(characters.hf.name_or_path))
    assert not lower._is_plain
    assert lower.encode("AB") == characters.encode("ab")
    with pytest.raises(UserError, match="cannot encode"):
        characters.encode("AB")


def test_character_tokenizer_is_one_that_transformers_loads(characters: Tokenizer) -> None:
    hf = AutoTokenizer.from_pretrained(characters.hf.name_or_path)
    assert hf.apply_chat_template(CHAT, add_generation_prompt=False, return_dict=False) == characters.render(
        CHAT, False
    )
    assert (hf.eos_token, hf.pad_token, hf.unk_token) == ("<|im_end|>", "<|pad|>", "<unk>")
    assert len(hf) == characters.vocab_size == 8 + 42


def test_unknown_characters_are_refused(characters: Tokenizer) -> None:
    with pytest.raises(UserError, match="cannot encode all of 'a❤b'"):
        characters.encode("a❤b")
    with pytest.raises(UserError, match="cannot encode"):
        characters.render([{"role": "user", "content": "A"}], True)


def test_render_is_what_a_server_renders() -> None:
    tokenizer = templated("plain")
    for prompt in (False, True):
        assert tokenizer.render(CHAT, prompt) == tokenizer.hf.apply_chat_template(
            CHAT, add_generation_prompt=prompt, return_dict=False
        )
    # the directory's eos alone would never stop a chat
    assert [tokenizer.decode([i]) for i in tokenizer.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_stop_ids_come_from_the_generation_config_too(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert characters.stop_ids == (3,)
    assert Tokenizer.load(str(tmp_path)).stop_ids == (3, 7)


def test_fingerprint_tells_tokenizers_apart(characters: Tokenizer, tmp_path: Path) -> None:
    same = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,+-=", tmp_path / "same")
    other = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .,+-", tmp_path / "other")
    template = Tokenizer.load(str(tmp_path / "same"))
    template.hf.chat_template += "\n"
    prints = [t.identity["fingerprint"] for t in (characters, same, other, template)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_fingerprint_catches_a_lost_normalizer(shared: Path) -> None:
    """Phi-3: AutoTokenizer builds LlamaTokenizer and drops the file's normalizer; the vocabulary is the same,
    the ids are not."""
    from transformers import PreTrainedTokenizerFast

    directory = str(shared / "tokenizers/phi3-mini")
    auto, direct = Tokenizer.load(directory), Tokenizer(PreTrainedTokenizerFast.from_pretrained(directory))
    assert auto.hf.get_vocab() == direct.hf.get_vocab()
    assert auto.identity != direct.identity
    trap = auto.class_mismatch()
    assert trap is not None
    assert re.match(
        r"AutoTokenizer makes a LlamaTokenizer\w* of .*phi3-mini, whose ids differ from its tokenizer.json's: "
        r"'  two  spaces.* is \[",
        trap,
    )
    assert direct.class_mismatch() is None
    qwen3 = Tokenizer.load(str(shared / "tokenizers/qwen3"))
    assert qwen3.class_mismatch() is None
    assert qwen3.vocab_size == 151669
    assert [qwen3.decode([i]) for i in qwen3.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


def test_another_tokenizer_is_refused_by_its_first_difference(characters: Tokenizer, tmp_path: Path) -> None:
    characters.raise_if_different(characters.identity, "it")
    characters.raise_if_different(json.loads(json.dumps(characters.identity)), "it")
    other = character_tokenizer("!abcdefghijklmnopqrstuvwxyz0123456789 .,+-=", tmp_path / "other")
    with pytest.raises(
        UserError,
        match=r"^it was made with another tokenizer than the model's: "
        r"for '.*' it has the ids \[.*\], but the model's tokenizer gives \[.*\]$",
    ):
        characters.raise_if_different(other.identity, "it")
    template = Tokenizer.load(characters.hf.name_or_path)
    template.hf.chat_template += "\n"
    with pytest.raises(UserError, match=r"they differ in their chat template$"):
        characters.raise_if_different(template.identity, "it")


def test_a_document_begins_as_servers_begin_it(shared: Path) -> None:
    for name in ("qwen3", "gpt2", "phi3-mini"):
        tokenizer = Tokenizer.load(str(shared / "tokenizers" / name))
        for text in ("one", " two ", "\n"):
            ids = tokenizer.begin(text)
            assert ids[len(ids) - len(tokenizer.encode(text)) :] == tokenizer.encode(text)
            assert ids == tokenizer.hf(text)["input_ids"]
    tokenizer.hf.add_bos_token = True
    assert tokenizer.begin("one") == [tokenizer.hf.bos_token_id, *tokenizer.encode("one")]


def test_fingerprint_is_the_same_in_another_process(characters: Tokenizer) -> None:
    code = "import sys; from ptf.data.tokenizer import Tokenizer; print(ascii(Tokenizer.load(sys.argv[1]).identity))"
    env = os.environ | {"PYTHONHASHSEED": "1"}
    found = run_python("-c", code, characters.hf.name_or_path, check=True, env=env).stdout.strip()
    assert found == ascii(characters.identity)


def test_no_tokenizer_and_no_template_are_named(characters: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path))
    characters.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    bare = Tokenizer.load(str(tmp_path))
    assert bare.stop_ids == (3,)
    with pytest.raises(UserError, match="has no chat template"):
        bare.render(CHAT, True)


def test_a_refusing_template_is_named(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path)
    strict = Tokenizer.load(str(tmp_path))
    strict.hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        UserError, match=f"chat template {tmp_path.name}#[0-9a-f]{{8}} refuses the messages: roles must alternate"
    ):
        strict.render(CHAT, True)


@pytest.mark.parametrize("kind", sorted(PLAIN_CLASSES))
@pytest.mark.parametrize("family", sorted(PLAIN_FAMILIES, key=str))
def test_a_plain_directory_is_loaded_as_auto_tokenizer_loads_it(
    characters: Tokenizer, tmp_path: Path, family: str | None, kind: str
) -> None:
    """Of these AutoTokenizer is not asked, since importing it takes longer than the rest of a process's imports."""
    characters.save(tmp_path)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert tokenizer_class(str(tmp_path)) is not AutoTokenizer
    auto, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(str(tmp_path))
    assert type(auto) is type(ours.hf)
    assert Tokenizer(auto).identity == ours.identity


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (None, {"tokenizer_class": "Qwen2Tokenizer"}),
        (None, {"auto_map": {"AutoTokenizer": [None, "code.Tokens"]}}),
        *((family, {}) for family in ("phi3", "qwen2", "mistral", "other")),
    ],
)
def test_any_other_directory_is_auto_tokenizers(
    characters: Tokenizer, tmp_path: Path, family: str | None, keys: dict
) -> None:
    characters.save(tmp_path)
    edit(tmp_path / "tokenizer_config.json", **{"tokenizer_class": "PreTrainedTokenizerFast", **keys})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert tokenizer_class(str(tmp_path)) is AutoTokenizer


def edit(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_a_process_imports_no_more_of_transformers_than_it_needs(characters: Tokenizer) -> None:
    code = (
        f"import sys, ptf.data.tokenizer as t; t.Tokenizer.load({characters.hf.name_or_path!r}); "
        f"print([n for n in {HEAVY} if n in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    assert all(name in sys.modules for name in HEAVY[:1])  # negative control: this file asks for AutoTokenizer
