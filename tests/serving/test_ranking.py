"""Rankings over HTTP are those that the evaluation of a run makes."""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import yaml

from ptf.config import loads
from ptf.errors import UserError
from ptf.events.model_ranking import Ranker, top
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
]
BASKETS = [
    ([], "baskets"),
    ([{"time": 1, "items": []}], "baskets"),
    ([{"time": "1", "items": ["item1"]}], "baskets"),
    ([{"time": 1, "items": ["item1", "spoon"]}], "'spoon' is not in the catalogue"),
    ([{"time": 1, "items": ["item1"]}, {"time": 1, "items": ["item2"]}], "must increase"),
]


def test_what_cannot_be_ranked_is_refused(place, tmp_path):
    async def wrong(client, endpoint):
        for body in WRONG:
            made = await client.post(RANK, json=body)
            assert made.status_code == 400, (str(body)[:80], made.text)

    async def wrong_baskets(client, endpoint):
        for baskets, message in BASKETS:
            made = await client.post(RANK, json={"histories": [baskets]})
            assert (made.status_code, message in made.json()["error"]["message"]) == (400, True), made.text

    asked(place / "extended", wrong, catalogue=catalogue_of(place))
    asked(with_settings(place, tmp_path), wrong_baskets, catalogue=catalogue_of(place))
    with pytest.raises(UserError, match="tokenizer"):
        asked(chatting(tmp_path / "other"), wrong, catalogue=catalogue_of(place))
