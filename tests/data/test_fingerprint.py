"""What decides the ids of a tokenizer, and what AutoTokenizer's class makes of a file beside the file's own content."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ptf.data.fingerprint import identity_of
from ptf.data.tokenizer import Tokenizer as OurTokenizer


def test_a_class_that_reads_its_file_differently_is_found(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    hf = SimpleNamespace(name_or_path=str(tmp_path))

    def class_mismatch(*probes: tuple[str, list[int]]) -> str | None:
        return OurTokenizer.class_mismatch(SimpleNamespace(hf=hf, identity={"probes": probes}))  # type: ignore[arg-type]

    assert class_mismatch(("a b", [9, 9])) is None, "without the file there is nothing to compare"
    backend = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert class_mismatch(("a b", [0, 1]), ("c", [2])) is None
    problem = class_mismatch(("a b", [0, 1]), ("b a", [0, 1]))
    assert problem is not None
    assert "'b a' is [0, 1], not [1, 0]" in problem


def trained(model: models.Model, trainer: trainers.Trainer) -> PreTrainedTokenizerFast:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    backend.train_from_iterator(["one two three one two one"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", additional_special_tokens=["<a>"])


SPECIAL = ["[UNK]", "<pad>"]


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer(special_tokens=SPECIAL)),
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(special_tokens=SPECIAL)),
        (models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer(special_tokens=SPECIAL)),
        (models.Unigram(), trainers.UnigramTrainer(special_tokens=SPECIAL, unk_token="[UNK]")),
    ],
    ids=["BPE", "WordPiece", "WordLevel", "Unigram"],
)
def test_the_vocabulary_is_that_of_the_tokenizer(model: models.Model, trainer: trainers.Trainer) -> None:
    hf = trained(model, trainer)
    before = identity_of(OurTokenizer(hf))["vocabulary"]
    vocabulary = json.dumps(sorted(hf.get_vocab().items()), ensure_ascii=False)
    assert before == hashlib.sha256(vocabulary.encode()).hexdigest()
    hf.add_tokens(["<b>"])
    assert identity_of(OurTokenizer(hf))["vocabulary"] != before


def test_two_tokens_of_one_id_are_both_in_the_vocabulary(tmp_path: Path) -> None:
    """Of these the configuration that the tokenizer writes lists one only."""
    config = json.loads(Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).to_str())
    config["model"]["vocab"]["b"] = 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    hf = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert len(json.loads(hf.backend_tokenizer.to_str())["model"]["vocab"]) < len(hf.get_vocab()) == 3
    vocabulary = json.dumps(sorted(hf.get_vocab().items()), ensure_ascii=False)
    assert identity_of(OurTokenizer(hf))["vocabulary"] == hashlib.sha256(vocabulary.encode()).hexdigest()
