import json
import os
import shutil
import threading

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf import storage
from ptf.errors import UserError
from ptf.storage import file_verification, listings


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """A fresh directory as a path, and as a URI of an object store."""
    if request.param == "local":
        yield str(tmp_path / "place")
    else:
        yield f"memory:///{tmp_path.name}/place"
        fsspec.filesystem("memory").store.clear()


@pytest.fixture
def made(tmp_path):
    """A committed directory of three files."""
    directory = tmp_path / "made"
    (directory / "sub").mkdir(parents=True)
    (directory / "a.bin").write_bytes(bytes(range(256)) * 5000)
    (directory / "sub" / "b.txt").write_text("b")
    (directory / "zero").touch()
    storage.commit(directory, {"step": 7})
    return directory


def test_text_round_trips_and_replaces(place):
    uri = f"{place}/deep/er/x.txt"
    assert not storage.exists(uri)
    for text in ("zwölf\r\n", ""):
        storage.write_text(uri, text)
        assert storage.read_text(uri) == text
    assert storage.exists(uri)
    assert storage.exists(place)
    assert [name.rpartition("/")[2] for name in storage.listing(place)] == ["x.txt"]  # nothing is left beside it


@given(st.text())
def test_any_text_comes_back(text):
    storage.write_text("memory://any", text)
    assert storage.read_text("memory://any") == text


def test_listing_of_a_file_a_directory_and_a_glob(place):
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "d.txt"):
        storage.write_text(f"{place}/{name}", name)

    def names(uri):
        return [found.partition("/place/")[2] for found in storage.listing(uri)]

    assert names(place) == names(place + "/") == ["a.jsonl", "b.jsonl", "d.txt", "sub/c.jsonl"]
    assert names(f"{place}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{place}/**/*.jsonl")[-1] == "sub/c.jsonl"
    assert names(f"{place}/a.jsonl") == ["a.jsonl"]
    assert [storage.read_text(found) for found in storage.listing(f"{place}/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    storage.write_text(f"{place}/e.jsonl", "")
    assert len(names(f"{place}/*.jsonl")) == 3  # not from a cache


def test_a_name_with_glob_characters_is_a_name_first(tmp_path):
    storage.write_text(str(tmp_path / "run[1]" / "x"), "")
    assert len(storage.listing(str(tmp_path / "run[1]"))) == 1


def test_what_is_missing_is_named(place):
    for call in (
        storage.listing,
        storage.read_text,
        storage.open_read,
        file_verification.verify,
        lambda uri: storage.localize(uri, "unused"),
    ):
        with pytest.raises(FileNotFoundError) as missing:
            call(f"{place}/nothing")
        assert f"{place}/nothing" in str(missing.value)
        assert isinstance(missing.value, UserError)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        storage.listing(f"{place}/*.parquet")
    with pytest.raises(UserError, match="nosuch://x"):
        storage.exists("nosuch://x")


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "x"
    storage.write_text(str(file), "old")

    def crash(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        storage.write_text(str(file), "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    file, texts = str(tmp_path / "x"), {letter * 200_000 for letter in "ab"}
    storage.write_text(file, "a" * 200_000)
    seen: set[str] = set()
    writer = threading.Thread(
        target=lambda: [storage.write_text(file, text) for _ in range(20) for text in sorted(texts)]
    )
    writer.start()
    while writer.is_alive():
        seen.add(storage.read_text(file))
    assert seen <= texts


def test_commit_and_verify(made):
    manifest = file_verification.verify(str(made))
    assert manifest["step"] == 7
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        "a.bin": 1_280_000,
        "sub/b.txt": 1,
        "zero": 0,
    }
    assert manifest == json.loads((made / "manifest.json").read_text()) == storage.commit(made, {"step": 7})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda d: (d / "a.bin").write_bytes(b"\x01" + (d / "a.bin").read_bytes()[1:]), "a.bin has changed"),
        (lambda d: (d / "a.bin").write_bytes((d / "a.bin").read_bytes()[:-1]), "a.bin has 1279999 bytes, not 1280000"),
        (lambda d: (d / "sub/b.txt").unlink(), "sub/b.txt is missing"),
        (lambda d: (d / "manifest.json").unlink(), "never finished"),
        (lambda d: (d / "manifest.json").write_text("{}"), "manifest.json is not a manifest"),
        (lambda d: (d / "manifest.json").write_text('{"fil'), "manifest.json is not a manifest"),
    ],
)
def test_verify_names_the_file_that_is_wrong(made, harm, words):
    harm(made)
    with pytest.raises(storage.Corrupt) as corrupt:
        file_verification.verify(str(made))
    assert words in str(corrupt.value)


def test_upload_twice_is_upload_once_and_verifies(made, place, tmp_path):
    target = f"{place}/v1"
    storage.upload(made, target)
    first = storage.listing(target)
    storage.upload(str(made), target + "/")
    assert storage.listing(target) == first
    assert len(first) == 4
    assert file_verification.verify(target) == file_verification.verify(str(made))
    copy = storage.localize(target, tmp_path / "cache")
    assert file_verification.verify(copy) == file_verification.verify(str(made))
    assert storage.localize(target, tmp_path / "cache") == copy


def test_a_place_of_which_nothing_is_wanted_is_an_empty_copy(made, tmp_path):
    storage.upload(made, "memory://nothing/v1")
    assert not os.listdir(storage.localize("memory://nothing", tmp_path / "cache", without=["*"]))


def test_upload_writes_the_manifest_last(made, place, monkeypatch):
    """Whatever file an upload stops at, the place does not look finished."""
    count = 0

    def stop(*_, **__):
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("cut off")

    files = fsspec.filesystem("memory" if place.startswith("memory") else "file")
    owner, name = (type(files), "put_file") if place.startswith("memory") else (shutil, "copyfile")
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: (stop(), real(*args, **kwargs))[1])
    with pytest.raises(RuntimeError, match="cut off"):
        storage.upload(made, place)
    assert len(storage.listing(place)) == 2
    with pytest.raises(storage.Corrupt, match="never finished"):
        file_verification.verify(place)


def test_localize_leaves_a_local_directory_where_it_is(made, tmp_path):
    assert storage.localize(str(made), tmp_path / "cache") == str(made)
    assert storage.localize(f"file://{made}", tmp_path / "cache") == str(made)


def test_localize_keeps_places_apart_and_follows_changes(made, tmp_path):
    for name in ("a/hf", "b/hf"):
        storage.upload(made, f"memory://{name}")
    copies = [storage.localize(f"memory://{name}", tmp_path / "cache") for name in ("a/hf", "b/hf")]
    assert copies[0] != copies[1]
    (made / "zero").write_text("changed")
    storage.commit(made, {"step": 8})
    storage.upload(made, "memory://a/hf")
    assert file_verification.verify(storage.localize("memory://a/hf", tmp_path / "cache"))["step"] == 8
    fsspec.filesystem("memory").store.clear()


def test_a_file_that_is_removed_while_a_directory_is_listed_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    retry = listings.retry

    def pruned(*arguments):
        found = retry(*arguments)
        (tmp_path / "b").unlink()
        return found

    monkeypatch.setattr(listings, "retry", pruned)
    assert [name.rpartition("/")[2] for name in storage.listing(f"{tmp_path}/*")] == ["a"]


def test_a_link_to_nothing_is_an_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        storage.change_stamps(f"{tmp_path}/*")
