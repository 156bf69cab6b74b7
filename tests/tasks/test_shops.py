import pytest

from ptf.errors import UserError
from ptf.tasks import shops


def test_files_are_found_or_named(tmp_path, monkeypatch):
    (tmp_path / "events").mkdir()
    names = [tmp_path / "events" / f"complete_journey_{kind}.csv.gz" for kind in ("events", "items")]
    names[0].touch()
    with pytest.raises(UserError, match=r"there is no .*_items\.csv\.gz; set PTF_DATA"):
        shops.source("complete_journey", str(tmp_path))
    names[1].touch()
    monkeypatch.setenv("PTF_DATA", str(tmp_path))
    assert shops.source("complete_journey") == shops.source("complete_journey", str(tmp_path))
    with pytest.raises(UserError, match="shop must be one of online_retail, complete_journey, movielens_100k, not 'x'"):
        shops.source("x", str(tmp_path))


def test_the_columns_of_a_shop_are_told_to_the_preparation_of_events(tmp_path, monkeypatch):
    (tmp_path / "events").mkdir()
    for kind in ("events", "items"):
        (tmp_path / "events" / f"online_retail_2009_2010_{kind}.csv.gz").touch()
    given = {}
    monkeypatch.setattr(shops.events, "prepare", lambda directory, **found: given.update(found))
    shops.prepare("made", shop="online_retail", data=str(tmp_path), window=64)
    assert given["columns"] == {"user": "customer", "time": "unix_ts"}
    assert given["item_columns"] == {"value": "median_price"}
    assert given["window"] == 64
    assert given["events"].endswith("_events.csv.gz")
    assert given["items"].endswith("_items.csv.gz")


@pytest.mark.parametrize("shop", shops.SHOPS)
def test_the_files_of_a_shop_have_the_columns_that_are_told(shared, shop):
    """Where the data are: the first rows of both files can be read."""
    if not [*(shared / "events").glob(f"{shop}*_events.csv.gz")]:
        pytest.skip(f"needs events of {shop} in the real data: `make data`, or point PTF_DATA at it")
    told = shops.source(shop, str(shared))
    for kind, names in (("events", ("user", "time", "item")), ("items", ("item", "value", "description"))):
        columns = told.get("columns" if kind == "events" else "item_columns", {})
        _, row = next(shops.events.table(told[kind]))
        assert {columns.get(name, name) for name in (*names, *columns)} <= row.keys()
