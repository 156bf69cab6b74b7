"""What AutoTokenizer's class makes of a file, beside the file's own content."""

from pathlib import Path
from types import SimpleNamespace

from ptf.data.fingerprint import class_mismatch


def test_a_class_that_reads_its_file_differently_is_found(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    hf = SimpleNamespace(name_or_path=str(tmp_path))
    assert class_mismatch(hf, {"probes": [("a b", [9, 9])]}) is None, "without the file there is nothing to compare"
    backend = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert class_mismatch(hf, {"probes": [("a b", [0, 1]), ("c", [2])]}) is None
    problem = class_mismatch(hf, {"probes": [("a b", [0, 1]), ("b a", [0, 1])]})
    assert problem is not None
    assert "'b a' is [0, 1], not [1, 0]" in problem
