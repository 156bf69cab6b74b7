"""Which files of a directory are data: one split, one format, and nothing that only lies beside them."""

import json
from pathlib import Path

import datasets
import fsspec
import pytest

from ptf.data.sources.files import choose, resolve_files
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import SourceSpec, first_lines, rows_once
from ptf.errors import UserError

SHARDS = ["data/test-00000-of-00001.parquet", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]


def chosen(names: list[str], readme: str = "", **keys: str) -> list[str]:
    texts = {"README.md": f"---\nlicense: mit\n{readme}\n---\n# A dataset\n"}
    return choose(sorted([*names, *(["README.md"] if readme else [])]), texts.__getitem__, "here", **keys)


@pytest.mark.parametrize(
    "names",
    [
        SHARDS,
        ["train.jsonl", "test.jsonl"],
        ["gsm8k/train.jsonl", "gsm8k/test_first819.jsonl"],
        ["train/a.jsonl", "dev/a.jsonl"],
        ["x/train/part-0.parquet", "x/validation/part-0.parquet"],
        ["chat_train.json", "chat_val.json"],
        ["train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet"],
        ["my.training.csv", "my.eval.csv"],
    ],
)
def test_two_splits_are_never_read_together_unasked(names: list[str]) -> None:
    with pytest.raises(UserError, match=r"here has several splits: .*here::SPLIT"):
        chosen(names)


@pytest.mark.parametrize(
    "names",
    [
        ["a.jsonl", "b.jsonl", "sub/c.jsonl"],
        ["year=2024/a.parquet", "year=2025/a.parquet"],
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["en/train.jsonl", "fr/train.jsonl"],
        ["latest.jsonl", "contest.jsonl", "retrained.jsonl"],  # words that only contain one
        ["chat-00000-of-00001.parquet", "code-00000-of-00001.parquet"],
        ["train.jsonl", "more.jsonl"],
    ],
)
def test_without_a_choice_to_make_all_files_are_read(names: list[str]) -> None:
    assert chosen(names) == sorted(names)


def test_a_split_is_chosen_by_name_and_two_by_a_plus() -> None:
    assert chosen(SHARDS, split="train") == SHARDS[1:]
    assert chosen(SHARDS, split="train+test") == SHARDS
    assert chosen(["train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet"], split="train_sft") == [
        "train_sft-00000-of-00001.parquet"
    ]
    assert chosen(["train/a.jsonl", "dev/a.jsonl"], split="validation") == ["dev/a.jsonl"]
    with pytest.raises(UserError, match="no split 'dev'; it has: test, train"):
        chosen(SHARDS, split="dev")
    with pytest.raises(UserError, match="its file names have no split, so name none"):
        chosen(["a.jsonl", "b.jsonl"], split="train")


def test_several_formats_are_refused_with_the_list() -> None:
    with pytest.raises(
        UserError,
        match=r"files of several formats: 1 \.jsonl \(a\.jsonl\); 2 \.parquet \(b\.parquet, "
        r"c\.parquet\)\. .*here/\*\.jsonl",
    ):
        chosen(["a.jsonl", "b.parquet", "c.parquet", "notes.txt"])
    with pytest.raises(UserError, match="several formats"):
        chosen(["a.jsonl", "a.jsonl.gz"])  # the same rows twice, as often as not


def test_what_describes_data_is_none() -> None:
    beside = [
        "dataset_infos.json",
        "x/dataset_info.json",
        "x/state.txt",
        "manifest.json",
        "_SUCCESS",
        "_metadata.parquet",
        ".cache/b.json",
        "x/.hidden.json",
    ]
    beside += [
        "README",
        "cache-0123456789abcdef.arrow",
        "__pycache__/a.json",
        "_temporary/0/part.json",
        "bad_rows.jsonl",
    ]
    assert chosen(["a.json", *beside]) == ["a.json"]


README = """configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - split: test
    path: [main/test-*]
- config_name: socratic
  default: %s
  data_dir: socratic
"""
CONFIGS = [f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("test", "train")]


def test_the_readme_names_configs_and_splits() -> None:
    for default in ("false", "true"):
        assert chosen(CONFIGS, README % default, config="main", split="train") == ["main/train-00000-of-00001.parquet"]
        assert chosen(CONFIGS, README % default, config="socratic", split="test") == [
            "socratic/test-00000-of-00001.parquet"
        ]
    assert chosen(CONFIGS, README % "true", split="train") == ["socratic/train-00000-of-00001.parquet"]
    with pytest.raises(UserError, match="several configs: write here:CONFIG, one of main, socratic"):
        chosen(CONFIGS, README % "false", split="train")
    with pytest.raises(UserError, match=r"no config 'other'.*main, socratic"):
        chosen(CONFIGS, README % "false", config="other")
    with pytest.raises(UserError, match=r"several splits: train .*; test "):
        chosen(CONFIGS, README % "false", config="main")
    assert chosen(["a/x.jsonl", "b/y.jsonl"], "configs:\n- {config_name: default, data_files: 'a/**'}") == ["a/x.jsonl"]
    # a header without data files
    assert chosen(["train.jsonl", "test.jsonl"], "tags: [x]", split="train") == ["train.jsonl"]


def test_folders_are_configs_where_no_readme_says_otherwise() -> None:
    assert chosen(CONFIGS, config="main", split="train") == ["main/train-00000-of-00001.parquet"]
    with pytest.raises(UserError, match=r"no config 'x'.*: main, socratic"):
        chosen(CONFIGS, config="x")
    with pytest.raises(UserError, match="several configs"):
        choose(CONFIGS, str, "here", split="train", folders_are_configs=True)


def numbers(location: str) -> list[int]:
    return [place.read()["n"] for place in rows_once(Reader(location))]


def lines(*rows: int) -> str:
    return "".join(json.dumps({"n": n}) + "\n" for n in rows)


def test_a_directory_of_two_splits_is_not_read_as_one(tmp_path: Path) -> None:
    for split, n in (("train", 1), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text(lines(n))
    for path in (tmp_path, f"{tmp_path}/*.jsonl"):
        with pytest.raises(UserError, match="several splits"):
            Reader(str(path))
        assert numbers(f"{path}::train") == [1]
    assert numbers(f"{tmp_path}/train*") == numbers(str(tmp_path / "train.jsonl")) == [1]
    found = resolve_files(f"{tmp_path}::train")
    assert found.not_read == ("test.jsonl",)
    assert first_lines({"sums": SourceSpec(f"{tmp_path}::train")})[1] == "data: sums: not read: test.jsonl"


def test_a_bucket_is_read_by_the_same_rules() -> None:
    files = fsspec.filesystem("memory")
    try:
        for name in ("train/a.jsonl", "train/b.jsonl", "test/a.jsonl", "dataset_info.json"):
            files.pipe_file(f"/set/{name}", lines(*([1] if "a." in name else [2])).encode())
        with pytest.raises(UserError, match="several splits"):
            Reader("memory://set")
        assert numbers("memory://set::train") == [1, 2]
        assert resolve_files("memory://set::train").not_read == ("dataset_info.json", "test/a.jsonl")
    finally:
        files.store.clear()


def test_what_save_to_disk_wrote_is_read_as_it_lists_it(tmp_path: Path) -> None:
    saved = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({"n": rows})
            for split, rows in (("train_sft", [1, 2, 3, 4]), ("held_out", [5]))
        }
    )
    saved.save_to_disk(tmp_path, num_shards={"train_sft": 2, "held_out": 1})
    with pytest.raises(UserError, match=r"several splits: train_sft .*held_out"):
        Reader(str(tmp_path))
    assert numbers(f"{tmp_path}::train_sft") == [1, 2, 3, 4]
    (tmp_path / "train_sft" / "data-00007-of-00009.arrow").write_bytes(
        (tmp_path / "held_out" / "data-00000-of-00001.arrow").read_bytes()
    )
    assert numbers(str(tmp_path / "train_sft")) == [1, 2, 3, 4]  # a shard of an earlier save is not of this one
    assert "data-00007-of-00009.arrow" in resolve_files(str(tmp_path / "train_sft")).not_read
    (tmp_path / "train_sft" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"state\.json lists data-00001-of-00002\.arrow, which is not there"):
        Reader(str(tmp_path / "train_sft"))
