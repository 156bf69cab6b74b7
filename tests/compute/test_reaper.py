"""The process that ends Ray after the process that started it."""

from pathlib import Path

from ptf.compute import reaper


def test_it_looks_often_and_ends_ray_once_its_driver_is_gone(tmp_path: Path, monkeypatch) -> None:
    parents, waits, ended = iter([7, 7, 7, 1]), list[float](), list[tuple[Path, float]]()
    monkeypatch.setattr(reaper.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(reaper.time, "sleep", waits.append)
    monkeypatch.setattr(reaper, "end", lambda home, grace_s: ended.append((home, grace_s)))
    reaper.main(7, tmp_path)
    assert ended == [(tmp_path, 3.0)]
    assert len(waits) == 3
    assert max(waits) <= 0.5
