from pathlib import Path

import pytest

from ptf.data.prepare import prepare
from ptf.errors import UserError
from ptf.storage import file_verification


def test_runs_once_for_each_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def plugin(directory: str) -> None:
        calls.append(directory)
        Path(directory, "model").mkdir()
        Path(directory, "model/config.json").write_text(str(len(calls)))

    first = prepare(plugin, "k1", str(tmp_path / "prepared"))
    assert first == str(tmp_path / "prepared/k1")
    assert set(file_verification.verify(first)["files"]) == {"model/config.json"}
    assert capsys.readouterr().out == ""
    assert prepare(plugin, "k1", str(tmp_path / "prepared")) == first
    assert capsys.readouterr().out == f"prepare: reusing {first}\n"
    assert len(calls) == 1
    other = prepare(plugin, "k2", str(tmp_path / "prepared"))
    assert Path(other, "model/config.json").read_text() == "2"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def plugin(directory: str) -> None:
        Path(directory, "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        prepare(plugin, "k", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_takes_what_the_faster_made(tmp_path: Path) -> None:
    def fast(directory: str) -> None:
        Path(directory, "by").write_text("fast")

    def slow(directory: str) -> None:
        prepare(fast, "k", str(tmp_path))
        Path(directory, "by").write_text("slow")

    made = prepare(slow, "k", str(tmp_path))
    assert Path(made, "by").read_text() == "fast"
    assert [p.name for p in tmp_path.iterdir()] == ["k"]


def test_a_directory_of_the_users_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    with pytest.raises(UserError, match="was not written by prepare"):
        prepare(lambda directory: None, "k", str(tmp_path))
