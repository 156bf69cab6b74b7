"""What ptf reads again is what it wrote: every kind of directory, every kind of harm, named;
and a second look costs nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from ptf import storage
from ptf.artifact import Artifact
from ptf.config import loads
from ptf.data import prepare as preparing
from ptf.data import tokenized
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import model_files
from ptf.run import run
from ptf.storage import Corrupt, file_verification, published_versions
from ptf.train.tokenize import tokenize
from tests.data.test_s3 import Server, server  # noqa: F401
from tests.reliability.damage import swapped
from tests.tiny import arithmetic, checkpoint

Open = Callable[[], Any]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of what was verified; and files that were just written count as settled."""
    monkeypatch.setenv("PTF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_verification, "FRESH_NS", -1)
    return tmp_path / "cache"


def prepared(tmp_path: Path) -> tuple[Path, Open]:
    def plugin(directory: str) -> None:
        for name in "ab":
            (Path(directory) / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")

    directory = preparing.prepare(plugin, "key", str(tmp_path / "prepared"))
    return Path(directory), lambda: preparing.prepare(plugin, "key", str(tmp_path / "prepared"))


def prepared_before(tmp_path: Path) -> tuple[Path, Open]:
    """As a later stage of a flow finds it."""
    directory, _ = prepared(tmp_path)
    job = loads(yaml.safe_dump(arithmetic(tmp_path)))
    return directory, lambda: Artifact("a", prepared=str(directory)).resolve(job)


def tokenized_data(tmp_path: Path) -> tuple[Path, Open]:
    job = loads(yaml.safe_dump(arithmetic(tmp_path, rows=20)))
    tokenizer = Tokenizer.load(job.model.path)
    place = tokenize(job, tokenizer, 1)["sums"]
    return Path(place), lambda: tokenized.reader(place, tokenizer)


def tokenized_again(tmp_path: Path) -> tuple[Path, Open]:
    """As the tokenize stage finds it when it runs once more."""
    job = loads(yaml.safe_dump(arithmetic(tmp_path, rows=20)))

    def open_it():
        return tokenize(job, Tokenizer.load(job.model.path), 1)

    return Path(open_it()["sums"]), open_it


def version(tmp_path: Path, root: str, name: str) -> None:
    staged = checkpoint(tmp_path / "staged" / name, seed=len(name))
    storage.commit(staged, {"version": name, "metrics": {}})
    storage.upload(staged, f"{root}/{name}")


def published_model(tmp_path: Path) -> tuple[Path, Open]:
    root = str(tmp_path / "versions")
    version(tmp_path, root, "one")
    published_versions.point(root, "one", None)
    return Path(root) / "one", lambda: model_files.locate(root)


def published_version(tmp_path: Path) -> tuple[Path, Open]:
    place, _ = published_model(tmp_path)
    return place, lambda: model_files.locate(str(place))


def two_versions(tmp_path: Path) -> str:
    root = str(tmp_path / "versions")
    for name in ("one", "second"):
        version(tmp_path, root, name)
        published_versions.point(root, name, published_versions.pointer(root))
    return root


def rollback_target(tmp_path: Path) -> tuple[Path, Open]:
    root = two_versions(tmp_path)
    return Path(root) / "one", lambda: published_versions.roll_back(root, "one")


def localised_model(tmp_path: Path) -> tuple[Path, Open]:
    """A model of somebody else's, without a manifest, from a store."""
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").put(f"{checkpoint(tmp_path / 'model')}/", "/models/tiny/", recursive=True)

    def open_it():
        return model_files.locate("memory://models/tiny", cache=str(tmp_path / "copies"))

    return open_it(), open_it


def localised_version(tmp_path: Path) -> tuple[Path, Open]:
    fsspec.filesystem("memory").store.clear()
    version(tmp_path, "memory://published", "one")
    published_versions.point("memory://published", "one", None)

    def open_it():
        return model_files.locate("memory://published", cache=str(tmp_path / "copies"))

    return open_it(), open_it


KINDS = [
    prepared,
    prepared_before,
    tokenized_data,
    tokenized_again,
    published_model,
    published_version,
    rollback_target,
    localised_model,
    localised_version,
]


def largest(place: Path) -> Path:
    return max(
        (file for file in place.iterdir() if file.name != storage.MANIFEST), key=lambda file: file.stat().st_size
    )


def flip(place: Path) -> str:
    """A bit, in place, and the times as they were."""
    file = largest(place)
    times = file.stat()
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{file.name} has changed: its SHA-256"


def truncate(place: Path) -> str:
    file = largest(place)
    os.truncate(file, file.stat().st_size - 1)
    return rf"{file.name} has \d+ bytes, not {file.stat().st_size + 1}"


def drop(place: Path) -> str:
    largest(place).unlink()
    return "is missing"


def foreign(place: Path) -> str:
    (place / "model-00002.safetensors").write_bytes(largest(place).read_bytes())
    return r"model-00002\.safetensors does not belong there"


def another(place: Path) -> str:
    """A whole file of the same size, from elsewhere, moved into its place."""
    file = largest(place)
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[::-1])
    os.replace(other, file)
    return f"{file.name} has changed: its SHA-256"


@pytest.mark.parametrize("harm", [flip, truncate, drop, foreign, another])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_what_was_written_is_named(tmp_path: Path, kind: Callable, harm: Callable) -> None:
    place, open_it = kind(tmp_path)
    open_it()
    words = harm(place)
    with pytest.raises(Corrupt, match=words):
        open_it()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_look_reads_nothing(tmp_path: Path, kind: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    place, open_it = kind(tmp_path)
    open_it()
    with monkeypatch.context() as patch:
        patch.setattr(file_verification, "_sha256", lambda uri, phase: pytest.fail(f"{uri} was read again"))
        open_it()
    file = largest(place)
    file.write_bytes(file.read_bytes())  # the same again: other times
    read = file_verification._sha256
    seen: list[str] = []
    monkeypatch.setattr(file_verification, "_sha256", lambda uri, phase: seen.append(uri) or read(uri, phase))
    open_it()
    assert seen == [str(file)]


@pytest.mark.parametrize("kind", [prepared, tokenized_data, published_version, localised_model])
def test_a_file_that_may_still_be_written_to_under_the_same_times_is_not_remembered(
    tmp_path: Path, kind: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_verification, "FRESH_NS", 10**18)
    _, open_it = kind(tmp_path)
    open_it()
    seen: list[str] = []
    monkeypatch.setattr(file_verification, "_sha256", lambda uri, phase: seen.append(uri) or "")
    with pytest.raises(Corrupt):
        open_it()
    assert seen


def test_times_of_whole_seconds_settle_later() -> None:
    second = 1_700_000_000 * 10**9
    now = second + 10**9
    assert not file_verification._settled(f"file 1 2 3 {second} {second}", now)
    assert file_verification._settled(f"file 1 2 3 {second} {second + 1}", now)
    assert file_verification._settled(f"file 1 2 3 {second} {second}", now + 2 * 10**9)
    assert not file_verification._settled("", now)


def test_objects_are_known_by_their_entity_tags(
    server: Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = f"s3://{server.bucket}/versions"
    for name in ("one", "second"):
        version(tmp_path, root, name)
        published_versions.point(root, name, published_versions.pointer(root))
    published_versions.roll_back(root)
    with monkeypatch.context() as patch:
        patch.setattr(file_verification, "_sha256", lambda uri, phase: pytest.fail(f"{uri} was read again"))
        published_versions.roll_back(root, "one")
    config = storage.read_text(f"{root}/one/config.json")
    storage.write_text(f"{root}/one/config.json", config.replace("2", "3", 1))
    with pytest.raises(Corrupt, match=r"one/config\.json has changed"):
        published_versions.roll_back(root, "one")


def test_above_verify_gib_the_run_says_what_was_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = arithmetic(tmp_path)
    job = loads(yaml.safe_dump(raw | {"checkpoint": {"every": 5, "sha256_max_gib": 1e-6}}))
    found = tokenize(job, Tokenizer.load(job.model.path), 1)
    job = Artifact("a", tokenized=found).resolve(job)
    run(job, "a")
    run(job, "a")
    said = capsys.readouterr().out
    for place in (found["sums"], found["held_out"], f"{raw['output']}/a/checkpoints/step_00000012"):
        assert f"not verified: {place} has " in said, place
    file = Path(found["sums"]) / "rows.parquet"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(Corrupt, match=r"rows\.parquet has \d+ bytes"):  # sizes are
        run(job, "a")


def test_two_directories_that_changed_places_are_told_apart(tmp_path: Path) -> None:
    """Though each is whole in itself."""
    root = two_versions(tmp_path)
    swapped(Path(root) / "one", Path(root) / "second")
    for open_it in (
        lambda: model_files.locate(root),
        lambda: model_files.locate(f"{root}/one"),
        lambda: published_versions.roll_back(root),
    ):
        with pytest.raises(Corrupt, match="holds another version"):
            open_it()

    job = loads(yaml.safe_dump(arithmetic(tmp_path)))
    tokenizer = Tokenizer.load(job.model.path)
    places = tokenize(job, tokenizer, 1)
    swapped(Path(places["sums"]), Path(places["held_out"]))
    with pytest.raises(Corrupt, match="holds other data"):
        tokenized.reader(places["sums"], tokenizer)

    for key in ("a", "b"):
        preparing.prepare(
            lambda directory, key=key: (Path(directory) / "x").write_text(key), key, str(tmp_path / "prepared")
        )
    swapped(tmp_path / "prepared" / "a", tmp_path / "prepared" / "b")
    with pytest.raises(Corrupt, match="was made for a different key, b"):
        preparing.prepare(lambda directory: pytest.fail("it is there"), "a", str(tmp_path / "prepared"))


def test_a_copy_of_a_published_version_may_have_any_name(tmp_path: Path) -> None:
    place, _ = published_model(tmp_path)
    shutil.copytree(place, tmp_path / "mine")
    assert model_files.locate(str(tmp_path / "mine")) == tmp_path / "mine"


def test_a_manifest_of_somebody_else_is_none_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpoint(tmp_path / "model")
    (directory / "manifest.json").write_text('{"layers": []}')
    assert model_files.locate(str(directory)) == directory
    assert "manifest.json is not ptf's" in capsys.readouterr().out


def test_without_a_place_to_remember_all_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PTF_CACHE", str(tmp_path / "file"))
    place, open_it = prepared(tmp_path)
    open_it()
    assert "cannot be remembered" in capsys.readouterr().out
    flip(place)
    with pytest.raises(Corrupt, match="has changed"):
        open_it()


def test_a_run_whose_data_were_damaged_does_not_begin(tmp_path: Path) -> None:
    """The error says what to do."""
    raw = arithmetic(tmp_path)
    job = loads(yaml.safe_dump(raw))
    found = tokenize(job, Tokenizer.load(job.model.path), 1)
    flip(Path(found["sums"]))
    with pytest.raises(UserError, match=r"rows\.parquet has changed.*remove .*: it is made again"):
        run(Artifact("a", tokenized=found).resolve(job), "a")
