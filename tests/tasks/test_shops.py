import pytest

from ptf.errors import UserError
from ptf.tasks import online_retail


def test_files_are_found_or_named(tmp_path, monkeypatch):
    (tmp_path / "events").mkdir()
    names = [tmp_path / "events" / f"online_retail_2009_2010_{kind}.csv.gz" for kind in ("events", "items")]
    names[0].touch()
    with pytest.raises(UserError, match=r"there is no .*_items\.csv\.gz; set PTF_DATA"):
        online_retail.files(str(tmp_path))
    names[1].touch()
    monkeypatch.setenv("PTF_DATA", str(tmp_path))
    assert online_retail.files(None) == online_retail.files(str(tmp_path)) == tuple(names)


def test_its_columns_are_told_to_the_preparation_of_events(tmp_path, monkeypatch):
    (tmp_path / "events").mkdir()
    for kind in ("events", "items"):
        (tmp_path / "events" / f"online_retail_2009_2010_{kind}.csv.gz").touch()
    given = {}
    monkeypatch.setattr(online_retail.events, "prepare", lambda directory, **found: given.update(found))
    online_retail.prepare("made", data=str(tmp_path), window=64)
    assert given["columns"] == {"user": "customer", "time": "unix_ts"}
    assert given["item_columns"] == {"value": "median_price"}
    assert given["window"] == 64
    assert given["events"].endswith("_events.csv.gz")
    assert given["items"].endswith("_items.csv.gz")
