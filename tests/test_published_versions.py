"""Versions and their pointer: whatever is published and rolled back at the same time, the pointer names a whole
version, and nothing is lost of where it was."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ptf import cli, storage
from ptf.errors import UserError
from ptf.storage import Corrupt, published_versions
from ptf.storage.published_versions import Pointer, latest, point, pointer, roll_back, versions
from tests.data.test_s3 import Server, server  # noqa: F401


def version(root: str, name: str, tmp_path: Path) -> str:
    made = tmp_path / "staged" / name
    made.mkdir(parents=True)
    (made / "model.bin").write_text(name)
    storage.commit(made, {"version": name, "metrics": {"accuracy": 0.5}})
    storage.upload(made, f"{root}/{name}")
    return name


def publish_two(root: str, tmp_path: Path) -> None:
    for name in "ab":
        point(root, version(root, name, tmp_path), pointer(root))


@pytest.fixture(params=["local", "s3"])
def root(request, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "published")
    return f"s3://{request.getfixturevalue('server').bucket}/published"


def test_the_pointer_moves_from_what_was_seen(root, tmp_path):
    assert pointer(root) is None
    assert latest(root) is None
    a, b, c = (version(root, name, tmp_path) for name in "abc")
    assert point(root, a, None)
    assert not point(root, b, None), "something was published meanwhile"
    assert latest(root) == f"{root}/a"
    first = pointer(root)
    assert point(root, b, first)
    assert not point(root, c, first)
    assert point(root, c, pointer(root))
    assert pointer(root) == Pointer("c", ("a", "b"))
    assert point(root, c, pointer(root)), "again changes nothing"
    assert pointer(root) == Pointer("c", ("a", "b"))
    assert versions(root) == ["a", "b", "c"]


def test_back_to_the_version_before_or_to_any(root, tmp_path):
    with pytest.raises(UserError, match="nothing is published in"):
        roll_back(root)
    for name in "abc":
        point(root, version(root, name, tmp_path), pointer(root))
    assert roll_back(root) == pointer(root) == Pointer("b", ("a",))
    assert roll_back(root) == Pointer("a")
    with pytest.raises(UserError, match="a is the only version that was published there"):
        roll_back(root)
    assert roll_back(root, "c") == Pointer("c", ("a",)), "and forward again"
    with pytest.raises(UserError, match="has no version d; it has a, b, c"):
        roll_back(root, "d")
    assert roll_back(root, "c") == pointer(root) == Pointer("c", ("a",))


def test_back_through_a_version_that_was_published_twice(root, tmp_path):
    names = {name: version(root, name, tmp_path) for name in "abc"}
    for name in "abac":
        point(root, names[name], pointer(root))
    assert roll_back(root) == Pointer("a", ("a", "b"))
    assert roll_back(root) == Pointer("b", ("a",))


def test_a_pointer_that_is_gone_is_written_anew(root, tmp_path):
    point(root, version(root, "a", tmp_path), None)
    storage.remove(f"{root}/{published_versions.POINTER}")
    with pytest.raises(UserError, match="nothing is published in"):
        roll_back(root)
    assert roll_back(root, "a") == pointer(root) == Pointer("a")


@pytest.mark.parametrize("name", ["a/", "../a", ".", "..", ""])
def test_what_is_no_name_becomes_no_pointer(tmp_path, name):
    root = str(tmp_path / "published")
    point(root, version(root, "a", tmp_path), None)
    for move in (lambda: roll_back(root, name), lambda: point(root, name, pointer(root))):
        with pytest.raises(UserError, match="is not the name of a version"):
            move()
    assert pointer(root) == Pointer("a")


def test_the_place_may_be_written_in_any_way(tmp_path, monkeypatch, capsys):
    root = tmp_path / "published"
    point(str(root), version(str(root), "a", tmp_path), None)
    monkeypatch.chdir(root)
    for where in (".", f"{root}/", "../published"):
        assert cli.main(["publish", where, "--list"]) == 0
        assert capsys.readouterr().out == "→ a\n"


def test_the_lock_of_another_user_is_waited_for_too(tmp_path, monkeypatch):
    """Whose file may be read and not written: here, whoever may do everything is denied it by hand."""
    root = str(tmp_path / "published")
    point(root, version(root, "a", tmp_path), None)
    opened = os.open

    def denying(path, flags, *more):
        if str(path).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", denying)
    assert point(root, version(root, "b", tmp_path), pointer(root))


def test_a_rollback_that_another_publication_overtakes_is_refused(root, tmp_path, monkeypatch):
    publish_two(root, tmp_path)
    move = published_versions._move

    def overtaken(*asked):
        monkeypatch.undo()
        assert point(root, version(root, "c", tmp_path), pointer(root))
        return move(*asked)

    monkeypatch.setattr(published_versions, "_move", overtaken)
    with pytest.raises(UserError, match="somebody else has just published"):
        roll_back(root)
    assert pointer(root) == Pointer("c", ("a", "b"))


def test_what_is_not_whole_is_not_gone_back_to(tmp_path):
    root = str(tmp_path / "published")
    publish_two(root, tmp_path)
    (Path(root) / "a" / "model.bin").write_text("z")
    with pytest.raises(Corrupt, match=r"a/model.bin has changed"):
        roll_back(root)
    assert pointer(root) == Pointer("b", ("a",))


UNREADABLE = [b"\xff\xfe", None]  # no text, and a directory
NO_POINTERS = [*UNREADABLE, b"", b"{", b"[]", b'"a"', b"{}", b"[" * 100_000, b'{"version": "a", "before": 3}']
NO_POINTERS += [json.dumps({"version": name}).encode() for name in (3, "", "..", "../a", "a/b")]


@pytest.mark.parametrize("content", NO_POINTERS)
def test_a_pointer_that_cannot_be_read_is_named(tmp_path, content, capsys):
    root = str(tmp_path / "published")
    version(root, "a", tmp_path)
    file = Path(root) / published_versions.POINTER
    file.mkdir() if content is None else file.write_bytes(content)
    said = "" if content in UNREADABLE else "is not a pointer "
    for ask in (pointer, latest, roll_back):
        with pytest.raises(Corrupt, match=rf"latest\.json {said}.*--rollback VERSION writes it anew"):
            ask(root)
    assert cli.main(["publish", root, "--list"]) == 2
    assert "latest.json" in capsys.readouterr().err
    if content not in UNREADABLE:
        assert roll_back(root, "a") == pointer(root) == Pointer("a"), "which writes it anew"


def test_a_pointer_to_nothing_is_named(tmp_path):
    root = str(tmp_path / "published")
    version(root, "a", tmp_path)
    (Path(root) / "latest.json").write_text('{"version": "gone"}')
    with pytest.raises(Corrupt, match=r"latest.json names gone, which is not there"):
        published_versions.manifest(root)
    assert roll_back(root, "a").version == "a", "which mends it"


def publish_all(root: str, names: list[str]) -> list[str]:
    """As the publish step does, until each has been the pointer's."""
    won = []
    for name in names:
        while not point(root, name, pointer(root)):
            pass
        won.append(name)
    return won


@pytest.mark.long
def test_of_all_that_publish_at_once_none_is_lost(root, tmp_path):
    names = [[version(root, f"{who}{i}", tmp_path) for i in range(4)] for who in "abc"]
    if root.startswith("s3"):
        with ThreadPoolExecutor(3) as several:
            list(several.map(publish_all, [root] * 3, names))
    else:
        with multiprocessing.get_context("spawn").Pool(3) as several:
            several.starmap(publish_all, [(root, each) for each in names])
    found = pointer(root)
    assert found is not None
    assert sorted([*found.before, found.version]) == sorted(name for each in names for name in each), (
        "each was seen by the one after it"
    )
    for each in names:
        at = [[*found.before, found.version].index(name) for name in each]
        assert at == sorted(at)


MOVES = (
    "import sys; from tests.test_published_versions import publish_all\nprint(flush=True)\nwhile True: "
    "publish_all(sys.argv[1], ['a', 'b'])"
)


@pytest.mark.long
def test_a_kill_at_any_instant_leaves_a_pointer_and_no_lock(tmp_path):
    root = str(tmp_path / "published")
    publish_two(root, tmp_path)
    for i in range(4):
        moving = subprocess.Popen([sys.executable, "-c", MOVES, root], stdout=subprocess.PIPE)
        assert moving.stdout
        moving.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            moving.wait(random.Random(i).uniform(0.02, 0.3))
        moving.kill()
        moving.wait(30)
        found = pointer(root)
        assert found is not None
        assert found.version in ("a", "b")
    assert point(root, "a", Pointer("b", found.before)) or point(root, "b", Pointer("a", found.before)), (
        "the lock went with its holder"
    )


def test_the_command_lists_and_goes_back(tmp_path, capsys):
    root = str(tmp_path / "out" / "published")
    job = tmp_path / "job.yaml"
    raw = {"recipe": "sft", "output": str(tmp_path / "out"), "model": {"path": "m"}}
    raw |= {"data": {"sources": {"a": {"path": "a"}}}, "train": {"steps": 1, "lr": 1e-3}}
    job.write_text(json.dumps(raw))
    assert cli.main(["publish", root, "--list"]) == 2
    publish_two(root, tmp_path)
    capsys.readouterr()
    assert cli.main(["publish", str(job), "--list"]) == 0
    assert capsys.readouterr().out == "  a\n→ b\n"
    assert cli.main(["publish", str(job), "--rollback"]) == 0
    assert capsys.readouterr().out == f"{root}: a is what is published now\n"
    assert cli.main(["publish", root, "--rollback", "b"]) == 0
    assert cli.main(["publish", root, "--rollback", "x"]) == 2
    assert "has no version x; it has a, b" in capsys.readouterr().err
