"""Items as tokens: what a slate names, semantic ids, and a catalogue with another tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptf.data.event_tokenizer import event_tokenizer
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.events import histories
from ptf.events.catalogue import Catalogue
from ptf.events.histories import Basket
from ptf.events.item_vectors import cooccurrence_vectors, item_vectors, rotate_to_width, text_vectors
from ptf.events.prepare import catalogue_rows, generated, prepare, read_events
from ptf.events.semantic_ids import SemanticIds
from tests.tiny import read_jsonl, write_jsonl


@pytest.fixture(scope="module", params=["items", {"levels": [6, 4]}], ids=["items", "semantic"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    generated(str(directory), users=40, items=30, kinds=3, ids=request.param)
    return directory


def extended(made: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(str(made / "model"))
    tokenizer.add([json.loads(line)["token"] for line in (made / "tokens.jsonl").read_text().splitlines()])
    return tokenizer


def test_a_slate_is_read_as_items_and_what_names_none_is_none(made: Path) -> None:
    catalogue = Catalogue.load(str(made / "catalogue.json"))
    a, b = catalogue.items[3], catalogue.items[7]
    assert catalogue.read(a.text + b.text + a.text + "<end>") == [a, b, a]
    assert catalogue.read("<gap_1>" + a.text) == [None, a]
    assert catalogue.read("") == []
    if "<b_" in a.text:
        begun = "".join(a.text.partition(">")[:2])
        assert catalogue.read(begun + a.text + b.text) == [None, a, b], "what is begun and not ended hides nothing"
    assert len({item.text for item in catalogue.items}) == 30
    tokenizer = extended(made)
    assert tokenizer.decode(tokenizer.encode(a.text + b.text)) == a.text + b.text
    for item in catalogue.items[:5]:  # all that the trie lets through is an item
        state = catalogue.trie(tokenizer).walked([*tokenizer.encode(item.text), tokenizer.stop_ids[0]])
        assert len(state) == item.text.count("<") + 1


def test_the_template_of_a_tokenizer_names_what_its_tokens_stand_for_if_that_is_given(tmp_path: Path) -> None:
    plain, named = (event_tokenizer(["<a>"], tmp_path / of, of).hf.chat_template for of in ("", "items"))
    assert plain == event_tokenizer(["<a>"], tmp_path / "default").hf.chat_template
    assert named == "{# items #}" + plain


def test_a_catalogue_of_another_tokenizer_is_refused(made: Path, tmp_path: Path) -> None:
    catalogue = Catalogue.load(str(made / "catalogue.json"))
    catalogue.raise_if_different(extended(made), "the model's")
    other = event_tokenizer(
        [*(item.text for item in catalogue.items if item.text.count("<") == 1), "<more>"], tmp_path / "other"
    )
    with pytest.raises(UserError, match="made with a different tokenizer than the model's"):
        catalogue.raise_if_different(other, "the model's")
    with pytest.raises(UserError, match="made with a different tokenizer"):
        catalogue.trie(other)
    turned = tmp_path / "items.jsonl"
    turned.write_text("".join(reversed((made / "items.jsonl").read_text().splitlines(keepends=True))))
    ids = "items" if catalogue.items[0].text.count("<") == 1 else {"levels": [6, 4]}
    prepare(str(tmp_path / "turned"), events=str(made / "events.jsonl"), items=str(turned), ids=ids)
    with pytest.raises(UserError, match="made with a different tokenizer"):  # the same tokens stand for other items
        catalogue.raise_if_different(extended(tmp_path / "turned"), "the model's")
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(UserError, match="is not a catalogue"):
        Catalogue.load(str(tmp_path / "c.json"))


def test_no_row_to_train_on_has_what_is_held_out(made: Path, tmp_path: Path) -> None:
    """A user whose last basket has an item that nobody else ever has: it is in nothing but the held-out rows, and not
    in what the items are known by."""
    for name in ("events.jsonl", "items.jsonl"):
        (tmp_path / name).write_text((made / name).read_text())
    with open(tmp_path / "items.jsonl", "a") as items:
        items.write(json.dumps({"item": "planted", "value": 1.0, "description": "planted"}) + "\n")
    with open(tmp_path / "events.jsonl", "a") as events:
        for time, item in ((1, "item1"), (2, "item2"), (3, "planted")):
            events.write(json.dumps({"user": "new", "time": time, "item": item}) + "\n")
    out = tmp_path / "out"
    prepare(str(out), events=str(tmp_path / "events.jsonl"), items=str(tmp_path / "items.jsonl"))
    planted = Catalogue.load(str(out / "catalogue.json")).by_name["planted"]
    assert planted.popularity == 0
    for name in ("train.jsonl", "train_prompts.jsonl", "histories.jsonl"):
        assert planted.text not in (out / name).read_text()
        assert "planted" not in (out / name).read_text()
    (row,) = [row for row in read_jsonl(out / "held_out.jsonl") if row["user"] == "new"]
    assert row["future"] == [["planted"]]
    kept = histories.load(str(out / "histories.jsonl"))["new"]
    assert kept == (Basket(1.0, ("item1",)), Basket(2.0, ("item2",))), "its earlier baskets are there, with their times"
    assert planted.text not in row["messages"][0]["content"]
    (continued,) = [row for row in read_jsonl(out / "held_out_loss.jsonl") if [planted.text] in row["events"]]
    assert continued["events"][continued["context"] :] == [[planted.text]], (
        "it is what is predicted, after all that is given"
    )


def test_a_date_splits_items_and_values_as_they_were_known_then(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The price of an item rises after the date, and another item is first bought then."""
    date = 1e9
    events = [{**row, "price": 1.0} for row in read_jsonl(made / "events.jsonl")]
    paid = [("item1", 1, 2.0), ("item2", 2, 3.0), ("item1", 3, 4.0), ("item1", date, 90.0), ("planted", date, 7.0)]
    paid += [("planted", date + 1, 7.0), ("planted", date + 2, 7.0), ("item2", date + 2, 3.0)]
    events = [row for row in events if row["item"] not in ("item1", "item2")]
    write_jsonl(
        tmp_path / "events.jsonl",
        [*events, *({"user": "new", "time": time, "item": item, "price": price} for item, time, price in paid)],
    )
    planted = {"item": "planted", "value": 50.0, "description": "planted"}
    write_jsonl(tmp_path / "items.jsonl", [*read_jsonl(made / "items.jsonl"), planted])
    files = {"events": str(tmp_path / "events.jsonl"), "items": str(tmp_path / "items.jsonl")}
    prepare(str(tmp_path / "date"), **files, columns={"value": "price"}, hold_out=date)
    assert "3 held-out events of items that were first bought later are dropped" in capsys.readouterr().out
    known = Catalogue.load(str(tmp_path / "date" / "catalogue.json")).by_name
    assert "planted" not in known
    assert len(np.load(tmp_path / "date" / "vectors.npy")) == len(known)
    assert known["item1"].value == 3.0
    (row,) = read_jsonl(tmp_path / "date" / "held_out.jsonl")
    assert row["future"] == [["item1"], ["item2"]]
    for name in ("catalogue.json", "tokens.jsonl", "train.jsonl", "train_prompts.jsonl", "held_out.jsonl"):
        assert "planted" not in (tmp_path / "date" / name).read_text()

    prepare(str(tmp_path / "last"), **files, columns={"value": "price"})  # negative control: nothing is dropped
    assert "0 held-out events of items that were first bought later are dropped" in capsys.readouterr().out
    always = Catalogue.load(str(tmp_path / "last" / "catalogue.json")).by_name
    assert always["planted"].value == 50.0
    listed = {row["item"]: row["value"] for row in read_jsonl(made / "items.jsonl")}
    assert always["item1"].value == listed["item1"] != 3.0
    (row,) = [row for row in read_jsonl(tmp_path / "last" / "held_out.jsonl") if row["user"] == "new"]
    assert set(row["future"][0]) == {"planted", "item2"}

    unpriced, _, counts = read_events(**files, hold_out=date)  # without prices, the file's values stay
    assert unpriced["item1"].value == listed["item1"]
    assert unpriced.keys() == known.keys()
    assert counts["later"] == 3
    with pytest.raises(UserError, match="'planted' is not in the catalogue"):  # which is another thing than `later`
        read_events(files["events"], str(made / "items.jsonl"), hold_out=date)
    with pytest.raises(UserError, match="no user has a basket to train on"):
        prepare(str(tmp_path / "early"), **files, hold_out=-1)


@pytest.mark.parametrize("window", [16, 64, 512])
def test_every_basket_is_trained_once_and_no_row_is_longer_than_the_window(
    made: Path, tmp_path: Path, window: int
) -> None:
    prepare(str(tmp_path), events=str(made / "events.jsonl"), items=str(made / "items.jsonl"), window=window)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (128, 2)
    assert config["max_position_embeddings"] == 2 * window
    trained = sum(
        len(entry)
        for row in read_jsonl(tmp_path / "train.jsonl")
        for entry in row["events"][row["context"] :]
        if isinstance(entry, list)
    )
    prompts = read_jsonl(tmp_path / "held_out.jsonl")
    events = read_jsonl(made / "events.jsonl")
    held = sum(len(row["future"][0]) for row in prompts)
    assert trained == len(events) - held
    tokenizer = extended(tmp_path)

    def size(row):
        return 1 + sum(len(entry) if isinstance(entry, list) else 1 for entry in row["events"][1:])

    assert max(map(size, read_jsonl(tmp_path / "train.jsonl"))) <= window
    assert max(len(tokenizer.encode(row["messages"][0]["content"])) for row in prompts) <= window


def test_items_may_be_worth_nothing_and_must_have_names(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"item": "a", "value": 0, "description": null}\n{"item": "b", "value": 2}\n')
    assert [(item.value, item.description) for item in catalogue_rows(str(file), {}).values()] == [(0.0, ""), (2.0, "")]
    for line, message in {
        '{"item": null}': "the column 'item' is empty",
        '{"item": "a", "value": null}': "value must be a number of at least 0, not None",
        '{"item": "a", "value": -1}': "must be a number of at least 0, not -1",
        '{"item": "a"}\n{"item": "a"}': "'a' is listed twice",
    }.items():
        file.write_text(line + "\n")
        with pytest.raises(UserError, match=message):
            catalogue_rows(str(file), {})


def test_users_with_nothing_to_learn_from_are_said(tmp_path: Path) -> None:
    rows = [{"user": f"u{n}", "time": time, "item": f"i{(n + time) % 4}"} for n in range(6) for time in (1, 2)]
    write_jsonl(tmp_path / "events.jsonl", rows)
    write_jsonl(tmp_path / "items.jsonl", [{"item": f"i{n}"} for n in range(4)])
    with pytest.raises(UserError, match="nothing is left to train on: no user has two baskets, or two items"):
        prepare(str(tmp_path / "made"), events=str(tmp_path / "events.jsonl"), items=str(tmp_path / "items.jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hold_out": -1.0}, "no user has a basket to train on"),
        ({"ids": "names"}, "ids must be `items`, or `levels`"),
        ({"ids": {"levels": [500]}}, "numbers of codes from 2 to 30"),
        ({"model": {"hiden_size": 8}}, "hiden_size is no key of its config.json"),
        ({"unknown": "eror"}, "unknown must be error or drop, not 'eror'"),
        ({"order": "srot"}, "order must be error or sort, not 'srot'"),
        ({"columns": {"usr": "user"}}, "columns: usr is none of user, time, item"),
        ({"item_columns": {"value": "prcie"}}, "item 1: the column prcie is missing; this row has"),
        ({"item_columns": {"valeu": "value"}}, "item_columns: valeu is none of item, value, description"),
        ({"base": "a/model", "model": {"hidden_size": 8}}, "model: a model that `base` names has its own sizes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    made: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(str(tmp_path), events=str(made / "events.jsonl"), items=str(made / "items.jsonl"), **settings)


def test_items_that_are_alike_share_codes_and_new_ones_take_free_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(4, 8))
    vectors = np.repeat(kinds, 10, 0) + 0.01 * rng.normal(size=(40, 8))
    ids = SemanticIds.fit(vectors, [4, 2])
    texts = ids.texts(vectors)
    assert len(set(texts)) == 40
    first = [text.split(">")[0] for text in texts]
    assert all(len(set(first[k : k + 10])) == 1 for k in range(0, 40, 10)), "the first level is the kind"
    assert len(set(first)) == 4
    assert {token for text in texts for token in text.replace("><", ">|<").split("|")} <= set(ids.tokens())
    assert ids.rows().shape == (len(ids.tokens()), 8)
    ids.save(tmp_path / "ids.npz")
    (new,) = SemanticIds.load(tmp_path / "ids.npz").texts(vectors[:1])
    assert new not in texts
    assert new.split(">")[0] == first[0]
    with pytest.raises(UserError, match="fit the ids again"):
        ids.texts(np.repeat(vectors[:1], 1000, 0))


def test_vectors_know_what_is_described_and_had_alike() -> None:
    texts = ["red cup", "red mug cup", "blue train", "blue train toy", ""]
    words = text_vectors(texts, 0, 4)
    assert words[0] @ words[1] > 0.2 > 0.1 > words[0] @ words[2]
    assert not words[4].any()
    both = cooccurrence_vectors([[0, 2], [0, 2], [1, 3], [1, 3], [0, 2]], 5, 0, 4)
    assert both[0] @ both[0] > 0.99
    assert not both[4].any()
    found = item_vectors([[0, 2], [1, 3]], texts, 16)
    np.testing.assert_allclose(np.linalg.norm(found[:4], axis=1), 1, atol=1e-9)
    wide = rotate_to_width(found, 16)
    np.testing.assert_allclose(wide @ wide.T, found @ found.T, atol=1e-5)


def test_codes_of_a_vector_do_not_depend_on_an_offset_or_on_the_others() -> None:
    """The distances are exact: cancellation between large numbers decides nothing."""
    rng = np.random.default_rng(0)
    centres = 1e8 + rng.normal(size=(16, 8))
    vectors = centres[rng.integers(0, 16, 200)] + 0.01 * rng.normal(size=(200, 8))
    ids = SemanticIds([centres], 0)
    codes = ids.codes(vectors)
    assert np.array_equal(codes, np.concatenate([ids.codes(one[None]) for one in vectors]))
    assert np.array_equal(codes, SemanticIds([centres - 1e8], 0).codes(vectors - 1e8))
