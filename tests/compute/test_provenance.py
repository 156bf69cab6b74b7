"""What a run was made with: the files that its numbers depend on, and no others; and the names of its data."""

import ast
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from ptf.compute.provenance import PACKAGES, TOOLS, code, made_with, raise_if_different
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import fingerprint
from ptf.errors import UserError
from tests.test_layers import ROOT, imports
from tests.tiny import arithmetic, write_jsonl
from tests.train.test_loop import train


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("copy") / "ptf"
    return Path(shutil.copytree(ROOT / "ptf", place, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("cli.py", False),
        ("inspection/report.py", False),
        ("config/reference.py", False),
        ("publish/model_card.py", False),
        ("train/trainer.py", True),
        ("rl/rewards/functions.py", True),
        ("data/packing.py", True),
        ("model/families/qwen.py", True),
        ("tasks/arithmetic.py", True),
    ],
)
def test_a_comment_counts_where_numbers_depend_on_the_file(copy: Path, file: str, counts: bool) -> None:
    assert (copy / file).is_file()
    code.cache_clear()
    before = code(copy)
    with (copy / file).open("a") as stream:
        stream.write("# a comment\n")
    code.cache_clear()
    assert (code(copy) != before) == counts


def test_the_name_of_a_file_counts(copy: Path) -> None:
    """Under another one, the same text is another module, though it stands in the same place of the order."""
    code.cache_clear()
    before = code(copy)
    (copy / "data/packing.py").rename(copy / "data/packings.py")
    code.cache_clear()
    assert code(copy) != before


def modules() -> dict[str, Path]:
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in (ROOT / "ptf").rglob("*.py")
    }


def test_nothing_that_a_run_imports_is_left_out() -> None:
    """Lazily or not, from all that trains and evaluates."""
    there = modules()
    left_out = {
        name
        for name, file in there.items()
        if any(fnmatch(file.relative_to(ROOT / "ptf").as_posix(), tool) for tool in TOOLS)
    }
    assert len(left_out) >= len(TOOLS)
    waiting, reached = ["ptf.run", "ptf.evaluate.measurement"], set()
    waiting += [name for name in there if name.startswith(("ptf.recipes.", "ptf.model.families", "ptf.tasks."))]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        if name == "ptf":  # every module of ptf imports it; what it offers to callers is loaded when it is used
            continue
        reached.add(name)
        for found in imports(ast.parse(there[name].read_text()), ".".join(there[name].relative_to(ROOT).parts[:-1])):
            module = found.module
            while module and module not in there:
                module = module.rpartition(".")[0]
            waiting += [module] if module else []
    assert not reached & left_out
    assert "ptf.train.trainer" in reached


def test_the_names_of_files_count(tmp_path: Path) -> None:
    """Not only what they hold together: a file under another name may stand elsewhere in the order."""
    for name in "ab":
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", [{"text": name}])
    before = fingerprint(Reader(str(tmp_path / "data")))
    (tmp_path / "data" / "b.jsonl").rename(tmp_path / "data" / "c.jsonl")
    assert fingerprint(Reader(str(tmp_path / "data"))) != before
    (tmp_path / "data" / "c.jsonl").rename(tmp_path / "data" / "b.jsonl")
    assert fingerprint(Reader(str(tmp_path / "data"))) == before


def test_a_run_does_not_go_on_with_files_of_other_names(tmp_path: Path) -> None:
    raw = arithmetic(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "train.jsonl").rename(data / "train.jsonl")
    raw["data"]["sources"]["sums"]["path"] = str(data)
    train(raw, "a")
    (data / "train.jsonl").rename(data / "other.jsonl")
    with pytest.raises(UserError, match="are not those of the checkpoint"):
        train(raw, "a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ptf": "other"}, r"ptf's code was other, is \w+"),
        ({"allowed": "other"}, "the allowed responses .* differ"),
        *(({"packages": {package: "0.1"}}, f"{package} was 0.1, is ") for package in PACKAGES),
    ],
)
def test_what_decides_the_bits_is_compared(change: dict[str, Any], said: str) -> None:
    now = made_with(torch.device("cpu"), {}, "")
    raise_if_different(
        {**now, "hardware": "other"}, now, "it", accepted=False, tell=True
    )  # the control: it is only said
    with pytest.raises(UserError, match=said):
        raise_if_different({**now, **change}, now, "it", accepted=False, tell=False)
    if "allowed" in change:  # the answers that may be sampled are no matter of versions
        with pytest.raises(UserError, match=said):
            raise_if_different({**now, **change}, now, "it", accepted=True, tell=False)
    else:
        raise_if_different({**now, **change}, now, "it", accepted=True, tell=True)
    assert len(now["packages"]) == len(PACKAGES) >= 6
