"""Rankings over HTTP are those that the evaluation of a run makes."""

import json
import math
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ptf.config import loads
from ptf.errors import UserError
from ptf.events.model_ranking import Ranker, top
from ptf.serving.ranking import RAREST, RankOptions, ranked
from ptf.serving.served_model import ServedModel
from tests.events.test_model_ranking import asked as prepared
from tests.events.test_model_ranking import engine_of, prepared_model
from tests.serving.serving import asked, chatting
from tests.tiny import arithmetic, read_jsonl

RANK = "/v1/rank"


@pytest.fixture(scope="module", params=["items", {"levels": [5, 3]}], ids=["items", "semantic"])
def place(request, tmp_path_factory) -> Path:
    return prepared_model(tmp_path_factory.mktemp("ranking"), request.param)


def catalogue_of(place: Path) -> str:
    return str(place / "made/catalogue.json")


def with_settings(place: Path, directory: Path, **args: object) -> ServedModel:
    """The model with a job that says how its histories are written."""
    raw = arithmetic(directory)
    raw["data"]["prepare"] = {"use": "ptf.events.prepare:generated", "args": args}
    return ServedModel(str(place / "extended"), "m", loads(yaml.safe_dump(raw)))


def test_a_ranking_is_that_of_the_evaluation(place):
    tokenizer, catalogue, prompts = prepared(place)
    expected = dict(Ranker(engine_of(place), catalogue, tokenizer, 100)(prompts))

    async def use(client, endpoint):
        texts = [prompt.row["messages"][0]["content"] for prompt in prompts]
        made = (await client.post(RANK, json={"histories": texts, "k": 5})).json()
        new = (await client.post(RANK, json={"histories": texts, "k": 5, "new": True})).json()
        (again,) = (await client.post(RANK, json={"histories": texts[:1], "k": 5})).json()["rankings"]
        assert again["items"] == made["rankings"][0]["items"]
        return made["rankings"], new["rankings"]

    rankings, new = asked(place / "extended", use, catalogue=catalogue_of(place))
    for i, prompt in enumerate(prompts):
        best = top(expected[i], 5)
        assert rankings[i]["items"] == [catalogue.items[j].name for j in best]
        assert rankings[i]["scores"] == pytest.approx(expected[i][best].tolist(), abs=1e-4)
        unseen = expected[i].copy()
        unseen[[j for j, item in enumerate(catalogue.items) if item.name in prompt.row["history"]]] = -np.inf
        assert new[i]["items"] == [catalogue.items[j].name for j in top(unseen, 5)]
        assert rankings[i]["own"] == [name in prompt.row["history"] for name in rankings[i]["items"]]
        assert not any(new[i]["own"])
        assert (rankings[i]["by"], rankings[i]["unknown"]) == ("model", 0)


def test_baskets_are_written_as_in_training(place, tmp_path):
    _, _, prompts = prepared(place)
    events = read_jsonl(place / "made/events.jsonl")
    histories, texts = [], []
    for prompt in prompts:
        own = [event for event in events if event["user"] == prompt.row["user"]]
        baskets = [(time, [event["item"] for event in of]) for time, of in groupby(own, lambda event: event["time"])]
        histories.append([{"time": time, "items": items} for time, items in baskets[:-1]])
        texts.append(prompt.row["messages"][0]["content"])

    async def use(client, endpoint):
        bodies = [{"histories": forms, "k": 7} for forms in (histories, texts)]
        return [(await client.post(RANK, json=body)).json() for body in bodies]

    by_baskets, by_texts = asked(with_settings(place, tmp_path, window=64), use, catalogue=catalogue_of(place))
    assert by_baskets == by_texts


def test_a_model_that_knows_the_time_of_a_request_is_told_it(place, tmp_path):
    """In the same words as in training: the last gap is until then."""
    history = [{"time": 0, "items": ["item1", "item2"]}, {"time": 86400.0 * 9, "items": ["item3"]}]
    text = prepared(place)[1].by_name

    async def use(client, endpoint):
        answers = {}
        for now in (86400.0 * 10, 86400.0 * 39, 86400.0 * 8, None, "soon"):
            answers[now] = (await client.post(RANK, json={"histories": [history], "k": 5, "now": now})).json()
        gaps = [f"<start>{text['item1'].text}{text['item2'].text}<gap_4>{text['item3'].text}<gap_{n}>" for n in (1, 5)]
        written = (await client.post(RANK, json={"histories": gaps, "k": 5})).json()
        return answers, written

    with_time = with_settings(place, tmp_path, request_time=True)
    answers, written = asked(with_time, use, catalogue=catalogue_of(place))
    first, second = written["rankings"]
    for found, expected in ((answers[86400.0 * 10], first), (answers[86400.0 * 39], second)):
        assert found["rankings"][0]["scores"] == pytest.approx(expected["scores"], abs=1e-5)
    assert first["scores"] != pytest.approx(second["scores"], abs=1e-4)
    assert "no earlier than the last basket" in answers[86400.0 * 8]["error"]["message"]
    assert "now must be given" in answers[None]["error"]["message"]
    assert "must be a time in seconds" in answers["soon"]["error"]["message"]
    (tmp_path / "other").mkdir()
    answers, _ = asked(with_settings(place, tmp_path / "other"), use, catalogue=catalogue_of(place))
    assert "only for a model of `request_time`" in answers[86400.0 * 10]["error"]["message"]
    assert "rankings" in answers[None]


def one(*items: str) -> list[dict]:
    return [{"time": 0, "items": list(items)}]


def test_unknown_items_are_ignored_and_counted(place, tmp_path):
    known = [{"time": 0, "items": ["item1", "item2"]}, {"time": 86400.0 * 9, "items": ["item3"]}]
    mixed = [
        {"time": -86400.0 * 40, "items": ["fork"]},  # as if it had not been
        {"time": 0, "items": ["spoon", "item1", "item2"]},
        {"time": 86400.0, "items": ["fork", "knife"]},
        {"time": 86400.0 * 9, "items": ["item3"]},
    ]

    async def use(client, endpoint):
        bodies = [{"histories": [history], "k": 24} for history in (known, mixed, known[:1])]
        return [(await client.post(RANK, json=body)).json()["rankings"][0] for body in bodies]

    plain, ignored, other = asked(with_settings(place, tmp_path), use, catalogue=catalogue_of(place))
    assert ignored == {**plain, "unknown": 4}
    assert plain["unknown"] == 0
    assert other["scores"] != plain["scores"], "what is known of a history is read"


def test_popular_items_rank_where_nothing_is_known(place, tmp_path):
    _, catalogue, _ = prepared(place)
    popular = sorted(catalogue.items, key=lambda item: -item.popularity)
    histories = [[], one("item5"), one("spoon", "fork"), one("item7"), "<start>"]

    async def use(client, endpoint):
        made = (await client.post(RANK, json={"histories": histories, "k": 24})).json()["rankings"]
        for history, ranking in zip(histories, made, strict=True):
            (alone,) = (await client.post(RANK, json={"histories": [history], "k": 24})).json()["rankings"]
            assert (alone["by"], alone["own"]) == (ranking["by"], ranking["own"])
            assert alone["scores"] == pytest.approx(ranking["scores"], abs=1e-4)
        bare = await client.post(RANK, json={"histories": [[]], "k": 3, "exclude": [popular[0].name], "new": True})
        return made, bare.json()["rankings"][0]

    made, bare = asked(with_settings(place, tmp_path), use, catalogue=catalogue_of(place))
    assert [ranking["by"] for ranking in made] == ["popularity", "model", "popularity", "model", "popularity"]
    assert [ranking["unknown"] for ranking in made] == [0, 0, 2, 0, 0]
    for i in (0, 2, 4):
        assert made[i]["items"] == [item.name for item in popular]
        assert made[i]["scores"] == pytest.approx([math.log(max(item.popularity, RAREST)) for item in popular])
        assert not any(made[i]["own"])
    assert bare["items"] == [item.name for item in popular[1:4]]
    assert made[1]["items"] not in (made[0]["items"], made[3]["items"]), "the model reads what there is"


def test_a_request_chooses_what_is_in_the_list(place, tmp_path):
    _, catalogue, _ = prepared(place)
    had = [item.name for item in catalogue.items[:12]]
    values = {item.name: item.value for item in catalogue.items}

    async def use(client, endpoint):
        async def of(**options):
            made = (await client.post(RANK, json={"histories": [one(*had)], **options})).json()
            (ranking,) = made["rankings"]
            return made["unknown"], dict(zip(ranking["items"], ranking["scores"], strict=True)), ranking["own"]

        _, plain, own = await of(k=24)
        assert own == [name in had for name in plain]
        unknown, some, _ = await of(k=24, candidates=["item20", "spoon", "item3", "item3", "fork"], exclude=["knife"])
        assert (unknown, list(some)) == (
            {"candidates": 2, "exclude": 1},
            [name for name in plain if name in ("item3", "item20")],
        )
        _, none, _ = await of(candidates=["spoon"])
        assert none == {}
        unknown, rest, _ = await of(k=24, exclude=list(plain)[:3])
        assert (unknown, list(rest)) == ({"exclude": 0}, list(plain)[3:])
        _, shared, own = await of(k=5, share_new=0.5, exclude=list(plain)[15:])
        assert own.count(False) >= min(3, sum(name not in had for name in list(plain)[:15]))
        assert list(shared) == [name for name in plain if name in shared]
        _, valued, _ = await of(k=24, value_weight=0.7)
        expected = {name: plain[name] + 0.7 * math.log(values[name]) for name in plain}
        assert valued == pytest.approx(expected, abs=1e-4)
        assert list(valued) == sorted(valued, key=lambda name: -valued[name])
        assert list(valued) != list(plain), "the weight matters"

    asked(with_settings(place, tmp_path), use, catalogue=catalogue_of(place))


SCORES = st.lists(st.sampled_from([-np.inf, -3.5, -2.0, -1.0, -0.5]), min_size=1, max_size=12).map(np.array)
ITEMS = st.sets(st.integers(0, 11))


@given(SCORES, ITEMS, ITEMS, st.none() | ITEMS, st.integers(1, 13), st.booleans(), st.floats(0, 1))
@example(np.array([-1.0, -2.0, -3.0, -4.0]), {0, 1}, set(), None, 2, False, 0.5)
@example(np.linspace(-1, -2, 12), {0, 1, 2}, {3}, {1, 3, 5}, 2, False, 1.0)
def test_a_list_has_what_was_asked_for_in_the_order_of_scores(scores, own, exclude, candidates, k, new, share):
    inside = set(range(len(scores)))
    among = None if candidates is None else sorted(candidates & inside)
    options = RankOptions(k, new, share, 0.0, among, frozenset(exclude & inside))
    made = ranked(scores, frozenset(own & inside), options)
    can = {i for i in inside if np.isfinite(scores[i])} - exclude
    can &= inside if among is None else set(among)
    can -= own if new else set()
    assert set(made) <= can
    assert len(made) == len(set(made)) == min(k, len(can))
    assert made == sorted(made, key=lambda i: (-scores[i], i))
    fresh = [i for i in made if i not in own]
    assert len(fresh) >= min(math.ceil(round(share * k, 9)), len(can - own))
    for kind in (can - own, can & own):  # of each kind the best are taken
        order = sorted(kind, key=lambda i: (-scores[i], i))
        kept = [i for i in made if i in kind]
        assert kept == order[: len(kept)]
    if len(fresh) > math.ceil(round(share * k, 9)):  # no place was given away
        assert made == sorted(can, key=lambda i: (-scores[i], i))[:k]


def test_options_have_an_effect():
    scores, own = np.array([-1.0, -2.0, -3.0, -4.0, -5.0]), frozenset({0, 1, 2})
    plain = ranked(scores, own, RankOptions(3))
    assert plain == [0, 1, 2] == top(scores, 3)
    assert ranked(scores, own, RankOptions(3, share_new=0.3)) == [0, 1, 3]
    assert ranked(scores, own, RankOptions(3, share_new=0.34)) == [0, 3, 4]
    assert ranked(scores, own, RankOptions(3, share_new=1.0)) == [0, 3, 4], "there are only two"
    assert ranked(scores, own, RankOptions(3, new=True)) == [3, 4]
    assert ranked(scores, own, RankOptions(3, candidates=[2, 4])) == [2, 4]
    assert ranked(scores, own, RankOptions(3, exclude=frozenset({0}))) == [1, 2, 3]
    assert ranked(scores, frozenset(), RankOptions(3, exclude=frozenset({0, 1}))) == [2, 3, 4]
    assert ranked(scores[::-1].copy(), own, RankOptions(3)) == [4, 3, 2], "scores decide, not the order"
    hundred = np.zeros(200)
    made = ranked(hundred, frozenset(range(150)), RankOptions(100, share_new=0.07))
    assert sum(i >= 150 for i in made) == 7, "0.07 · 100 is a little more than 7"


WRONG = [
    {},
    {"histories": []},
    {"histories": ["<start>"], "k": 0},
    {"histories": ["<start>"], "k": True},
    {"histories": ["<start>"], "new": 1},
    {"histories": [5]},
    {"histories": [[{"time": 1, "items": ["item1"]}]]},  # how histories are written is not known
    {"histories": ["<start>" + "<gap_0>" * 9000]},
    {"histories": ["<start>"], "temperature": 1},
    {"histories": ["<start>"], "now": 5},
    {"histories": ["<start><i_9999>"]},  # a text is read as it is
    *({"histories": [[]], "share_new": share} for share in (-0.1, 1.1, True, "1", None, math.nan)),
    *({"histories": [[]], "value_weight": weight} for weight in (-1, 1e9, False, "1", None, math.inf)),
    *({"histories": [[]], "candidates": names} for names in ([], "item1", [1], {"item1": 1})),
    *({"histories": [[]], "exclude": names} for names in ("item1", [None])),
]
BASKETS = [
    ({}, "baskets"),
    (["item1"], "baskets"),
    ([{"time": 1, "items": []}], "baskets"),
    ([{"time": 1, "items": [5]}], "baskets"),
    ([{"time": "1", "items": ["item1"]}], "baskets"),
    ([{"time": 1, "items": ["spoon"]}, {"time": 1, "items": ["item2"]}], "must increase"),
    ([{"time": math.inf, "items": ["item1"]}], "baskets"),
    ([{"time": math.nan, "items": ["item1"]}], "baskets"),
    ([{"time": 1, "items": ["item1"]}, {"time": 1, "items": ["item2"]}], "must increase"),
]


def test_what_cannot_be_ranked_is_refused(place, tmp_path):
    async def wrong(client, endpoint):
        for body in WRONG:
            made = await client.post(RANK, content=json.dumps(body))  # httpx itself refuses NaN
            assert made.status_code == 400, (str(body)[:80], made.text)
            named = made.json()["error"]["param"]
            assert named == next(
                (name for name in ("share_new", "value_weight", "candidates", "exclude") if name in body), named
            )

    async def wrong_baskets(client, endpoint):
        for baskets, message in BASKETS:
            made = await client.post(RANK, content=json.dumps({"histories": [baskets]}))
            assert (made.status_code, message in made.json()["error"]["message"]) == (400, True), made.text

    asked(place / "extended", wrong, catalogue=catalogue_of(place))
    asked(with_settings(place, tmp_path), wrong_baskets, catalogue=catalogue_of(place))
    with pytest.raises(UserError, match="tokenizer"):
        asked(chatting(tmp_path / "other"), wrong, catalogue=catalogue_of(place))
