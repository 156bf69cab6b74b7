"""Rivals that count: each is what its definition says, sees nothing of what is held out, and is refused by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.config import ConfigError
from ptf.config.sections.data import Source
from ptf.config.sections.evaluate import RankingConfig
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.events import histories
from ptf.events.baseline_ranking import rank_baselines
from ptf.events.baselines import BASELINES, check, fit, standardised
from ptf.events.histories import Basket, History
from ptf.events.prepare import generated, prepare
from ptf.events.purchases import Purchases
from ptf.events.ranking_metrics import with_value
from ptf.events.serialize import DAY
from tests.tiny import read_jsonl, write_jsonl

ITEMS = [f"i{n}" for n in range(8)]
SMALL: dict[str, dict[str, Any]] = {"mix": {"of": {"ease": {"weight": 1.0}, "tifu_knn": {"weight": 2, "groups": 2}}}}
SMALL |= {name: {"neighbours": 2} for name in ("tifu_knn", "tifu_knn_time", "taiw")}
baskets = st.lists(st.tuples(st.integers(1, 90), st.sets(st.sampled_from(ITEMS), min_size=1, max_size=4)), min_size=1)
users = st.lists(baskets, min_size=3, max_size=6)


def made(raw: Sequence[Sequence[tuple[int, Any]]]) -> list[tuple[str, History]]:
    """Histories of baskets that are given as days since the one before, and items."""
    found = []
    for number, history in enumerate(raw):
        times = np.cumsum([days for days, _ in history]) * DAY
        baskets = (Basket(float(time), tuple(items)) for time, (_, items) in zip(times, history, strict=True))
        found.append((f"u{number}", tuple(baskets)))
    return found


def random_users(seed: int, n: int = 12) -> list[tuple[str, History]]:
    rng = np.random.default_rng(seed)
    return made(
        [
            [
                (int(rng.integers(1, 60)), rng.choice(ITEMS, rng.integers(1, 5), replace=False).tolist())
                for _ in range(int(rng.integers(1, 9)))
            ]
            for _ in range(n)
        ]
    )


def scores(name: str, train: Any, asked: Any = None, now: Any = None, **changed: Any) -> np.ndarray:
    asked = train if asked is None else asked
    return fit(name, SMALL.get(name, {}) | changed, Purchases.of(train, ITEMS))(Purchases.of(asked, ITEMS, now))


@settings(deadline=None, max_examples=15)
@given(users, st.randoms())
def test_the_order_inside_a_basket_has_no_meaning(raw: Any, random: Any) -> None:
    turned = [[(days, random.sample(sorted(items), len(items))) for days, items in history] for history in raw]
    for name in BASELINES:
        a, b = (scores(name, made(one)) for one in ([[(d, sorted(i)) for d, i in h] for h in raw], turned))
        assert a.shape == (len(raw), len(ITEMS))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_order_of_baskets_has() -> None:
    ab, ba = (made([[(1, x), (9, y)], [(1, ["i2"])], [(1, ["i3"])]]) for x, y in ((["i0"], ["i1"]), (["i1"], ["i0"])))
    for name in ("recency", "decayed_frequency", "tifu_knn", "tifu_knn_time", "ease"):
        assert not np.allclose(scores(name, ab)[0], scores(name, ba)[0]), name
    np.testing.assert_allclose(scores("personal_frequency", ab), scores("personal_frequency", ba))


def test_ease_is_the_ridge_regression_of_each_item_on_the_others() -> None:
    train = random_users(0)
    x = Purchases.of(train, ITEMS).had.toarray()
    single = made([[(1, [item])] for item in ITEMS])
    found = scores("ease", train, single, l2=3.0)  # of a history of one item: its row of the weights
    assert (np.diag(found) == 0).all()
    for j in range(len(ITEMS)):
        rest = np.delete(np.arange(len(ITEMS)), j)
        wanted = np.linalg.solve(x[:, rest].T @ x[:, rest] + 3 * np.eye(len(rest)), x[:, rest].T @ x[:, j])
        np.testing.assert_allclose(found[rest, j], wanted, atol=1e-10)
    assert not np.allclose(found, scores("ease", train, single, l2=30.0), atol=1e-3)


@settings(deadline=None, max_examples=15)
@given(users)
def test_tifu_of_the_user_alone_is_decayed_frequency(raw: Any) -> None:
    train = made(raw)
    count = np.array([len(history) for _, history in train])[:, None]
    own = {"own_weight": 1.0, "groups": 1, "within_decay": 0.8}
    wanted = scores("decayed_frequency", train, decay=0.8, popularity=0.0) / count
    np.testing.assert_allclose(scores("tifu_knn", train, **own), wanted, atol=1e-12)
    by_group = own | {"groups": 1000, "within_decay": 0.5, "group_decay": 0.8}  # a basket a group
    np.testing.assert_allclose(scores("tifu_knn", train, **by_group), wanted, atol=1e-12)


def tifu(history: History, groups: int, within: float, between: float) -> np.ndarray:
    """By the definition, basket by basket; the newest groups take what is over."""
    n = min(groups, len(history))
    sizes = [len(history) // n + (g >= n - len(history) % n) for g in range(n)]
    vector, start = np.zeros(len(ITEMS)), 0
    for g, size in enumerate(sizes):
        for j, basket in enumerate(history[start : start + size]):
            decay = between ** (n - 1 - g) * within ** (size - 1 - j)
            vector[[ITEMS.index(item) for item in basket.items]] += decay / (size * n)
        start += size
    return vector


@pytest.mark.parametrize("own_weight", [0.3, 0.0])
def test_tifu_is_its_definition(own_weight: float) -> None:
    train = random_users(1)
    vectors = np.array([tifu(history, 3, 0.9, 0.6) for _, history in train])
    decays = {"groups": 3, "within_decay": 0.9, "group_decay": 0.6, "own_weight": own_weight, "neighbours": 4}
    found = scores("tifu_knn", train, **decays)
    for row, vector in enumerate(vectors):
        distance = ((vectors - vector) ** 2).sum(1)
        distance[row] = np.inf
        near = vectors[np.argsort(distance)[:4]].mean(0)
        np.testing.assert_allclose(found[row], own_weight * vector + (1 - own_weight) * near, atol=1e-12)
    itself = scores("tifu_knn", train, [("stranger", history) for _, history in train], **decays)
    assert not np.allclose(found, itself), "a user who is not known from training may have that history as a neighbour"


def test_up_cf_is_its_definition() -> None:
    train = random_users(2)
    profiles, sets = np.zeros((len(train), len(ITEMS))), []
    for row, (_, history) in enumerate(train):
        for basket in history[-3:]:
            profiles[row, [ITEMS.index(item) for item in basket.items]] += 1 / min(3, len(history))
        sets.append({item for basket in history[-3:] for item in basket.items})
    wanted = [
        sum(
            (len(a & b) / (len(a) ** 0.7 * len(b) ** 0.3)) ** 2 * profile
            for b, profile in zip(sets, profiles, strict=True)
        )
        for a in sets
    ]
    np.testing.assert_allclose(scores("up_cf", train, recency=3, alpha=0.7, locality=2.0), wanted, atol=1e-12)
    assert not np.allclose(scores("up_cf", train, recency=3, alpha=0.7, locality=5.0), wanted)


def test_tifu_with_time_decays_by_days() -> None:
    (history,) = made([[(0, ["i0"]), (70, ["i1"]), (5, ["i2"]), (5, ["i1"])]])  # 80, 10, 5 and 0 days before the last
    own = {"own_weight": 1.0, "group_days": 30.0, "within_decay": 0.9, "group_decay": 0.5}
    found = scores("tifu_knn_time", [history], **own)[0]
    oldest = 0.5**2 * 0.9**20 / 2
    newest = [(0.9**10 + 1) / 6, 0.9**5 / 6]
    np.testing.assert_allclose(found[:3], [oldest, *newest], atol=1e-12)
    later = scores("tifu_knn_time", [history], now=[history[1][-1].time + 7 * DAY], **own)[0]
    np.testing.assert_allclose(later[:3], [0.5**2 * 0.9**27 / 2, *(x * 0.9**7 for x in newest)], atol=1e-12)


def test_taiw_expects_an_item_when_it_was_bought_again_before() -> None:
    """Bread is bought each 7 days and salt each 60: 7 days after both, bread comes first; 60 days after, salt."""
    rng = np.random.default_rng(0)
    raw = [[(int(rng.integers(5, 10)), ["i0"]) for _ in range(20)] for _ in range(20)]
    raw += [[(int(rng.integers(57, 64)), ["i1"]) for _ in range(20)] for _ in range(20)]
    asked = [("new", (Basket(0.0, ("i0", "i1")),))]
    for days, wanted in ((7, 0), (60, 1)):
        (row,) = scores("taiw", made(raw), asked, [days * DAY], own_weight=1.0, prior=1.0)
        assert row[:2].argmax() == wanted
        assert row[2:].max() == 0, "never bought"


def test_what_is_bought_after_a_request_is_not_seen() -> None:
    train = random_users(3)
    now = [150 * DAY] * len(train)
    asked = [(user, tuple(b for b in history if b.time < now[0]) or history[:1]) for user, history in train]
    planted = [(user, (*(b for b in h if b.time < now[0]), Basket(160 * DAY, ("i7",)))) for user, h in train]
    cut = [(user, history[:-1]) for user, history in planted if history[:-1]]
    for name, changed in (("tifu_knn_time", {}), ("popularity", {"days": 40.0})):
        a, b = (scores(name, one, asked, now, **changed) for one in (cut, planted))
        np.testing.assert_allclose(a, b, atol=1e-12)
        assert not np.allclose(b, scores(name, planted, asked, **changed)), "without its time, all that is known counts"
    assert not np.allclose(scores("tifu_knn", cut, asked, now), scores("tifu_knn", planted, asked, now))


def test_the_time_of_the_request_counts_where_days_do() -> None:
    train = random_users(4)
    newest = [history[-1].time for _, history in train]
    later = [time + 30 * DAY for time in newest]
    timed = {"popularity": {"days": 30.0}, "decayed_frequency": {"half_life": 20.0}, "tifu_knn_time": {}, "taiw": {}}
    for name in BASELINES:
        a, b = (scores(name, train, None, now, **timed.get(name, {})) for now in (None, later))
        assert np.allclose(a, b) == (name not in timed), name
    half = scores("decayed_frequency", train, None, later, half_life=30.0, popularity=0.0)
    np.testing.assert_allclose(half, scores("decayed_frequency", train, half_life=30.0, popularity=0.0) / 2)


def test_a_mix_is_of_standardised_scores() -> None:
    train = random_users(5)
    alone = {name: standardised(scores(name, train)) for name in ("ease", "up_cf")}
    np.testing.assert_allclose(alone["ease"].std(1), 1)
    of = {"ease": {"weight": 0.5, "l2": 150.0}, "up_cf": {"weight": 2}}
    np.testing.assert_allclose(scores("mix", train, of=of), 0.5 * alone["ease"] + 2 * alone["up_cf"])
    assert (standardised(np.ones((2, 3))) == 0).all()


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("tifu", {}, "tifu is not a baseline; there are popularity, personal_frequency"),
        ("tifu_knn", {"k": 3}, r"tifu_knn has no setting 'k'; it has neighbours, own_weight"),
        ("tifu_knn", {"neighbours": 0}, r"tifu_knn\.neighbours must be a whole number of at least 1, not 0"),
        ("tifu_knn", {"neighbours": 2.5}, "must be a whole number of at least 1, not 2.5"),
        ("ease", {"l2": "much"}, r"ease\.l2 must be a number of at least 0, not 'much'"),
        ("ease", {"decay": True}, "must be a number of at least 0, not True"),
        ("ease", {"l2": 0}, r"ease\.l2 must be above 0"),
        ("tifu_knn_time", {"group_days": 0.0}, r"group_days must be above 0"),
        ("taiw", {"own_weight": 2}, r"own_weight must be at most 1, not 2"),
        ("mix", {"of": {"ease": 0.3}}, r"mix\.of must give each of the other baselines a `weight`, not ease: 0\.3"),
        ("mix", {"of": {}}, r"mix\.of must give other baselines by name"),
        ("mix", {"of": ["ease"]}, r"mix\.of must give other baselines by name"),
        ("item_knn", {"k": 3}, "it has none"),
        ("mix", {"of": {"ease": {}}}, r"mix\.of must give each of the other baselines a `weight`, not ease"),
        ("mix", {"of": {"mix": {"weight": 1}}}, r"mix\.of must give each of the other baselines"),
        ("mix", {"of": {"ease": {"weight": 1, "k": 2}}}, "ease has no setting 'k'"),
    ],
)
def test_unknown_names_and_settings_are_refused(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(name, changed)
    for known in BASELINES:
        check(known, SMALL.get(known, {}))


def test_values_move_what_is_worth_more_up_and_nothing_without_a_weight() -> None:
    scores = np.log([[0.5, 0.3, 0.2]])
    values = np.array([1.0, 4.0, 0.0])
    assert with_value(scores, values, 0.0) is scores
    weighed = with_value(scores, values, 0.5)
    np.testing.assert_allclose(weighed[0, :2], [np.log(0.5), np.log(0.3 * 2)])
    assert weighed[0].argsort().tolist() == [2, 0, 1]
    assert np.isneginf(weighed[0, 2])


def ranking(made: Path, **changed: Any) -> tuple[RankingConfig, dict[str, list[Prompt]]]:
    source = Source(path=str(made / "held_out.jsonl"), kind="prompt")
    section = RankingConfig(sources={"next": source}, catalogue=str(made / "catalogue.json"), **changed)
    rows = read_jsonl(made / "held_out.jsonl")
    return section, {"next": [Prompt(np.zeros(1, np.int32), row, "next", i) for i, row in enumerate(rows)]}


def test_baselines_are_ranked_for_the_users_that_the_model_is_ranked_for(tmp_path: Path) -> None:
    generated(str(tmp_path), users=40, items=24, kinds=3)
    section, prompts = ranking(tmp_path, k=5, baselines={"personal_frequency": {}, "popularity": {}, "ease": {}})
    found = rank_baselines(section, prompts, tmp_path / "ranked")
    rows = {name: read_jsonl(tmp_path / "ranked" / name / "next.jsonl") for name in section.baselines}
    for name in section.baselines:
        assert [row["user"] for row in rows[name]] == [p.row["user"] for p in prompts["next"]]
        mean = np.mean([row["all/ndcg@5"] for row in rows[name]])
        assert found[f"baseline/{name}/all/ndcg@5/next"] == pytest.approx(mean)
    assert found["baseline/personal_frequency/all/ndcg@5/next"] > found["baseline/popularity/all/ndcg@5/next"]

    weighed, _ = ranking(tmp_path, k=5, baselines={"popularity": {}}, value_weight=3.0)
    valued = rank_baselines(weighed, prompts, tmp_path / "valued")
    key = "baseline/popularity/all/revenue_recall@5/next"
    assert valued[key] > found[key]

    stranger = Prompt(np.zeros(1, np.int32), {**prompts["next"][0].row, "user": "nobody"}, "next", 0)
    shorter = Prompt(np.zeros(1, np.int32), {**prompts["next"][0].row, "history": ["item0"]}, "next", 0)
    for wrong in (stranger, shorter):
        with pytest.raises(UserError, match=r"histories\.jsonl has another history of user"):
            rank_baselines(section, {"next": [wrong]}, tmp_path / "wrong")
    timed = [Prompt(p.tokens, {**p.row, "now": 1e9 - 1e5 * i}, "next", i) for i, p in enumerate(prompts["next"])]
    assert rank_baselines(section, {"next": timed}, tmp_path / "timed") == found, "the order of requests matters not"
    (tmp_path / "histories.jsonl").unlink()
    with pytest.raises(UserError, match=r"there is no .*histories\.jsonl, .*; prepare the data again"):
        rank_baselines(section, prompts, tmp_path / "none")


def test_what_is_held_out_changes_no_score(tmp_path: Path) -> None:
    """Other last baskets, of an item that nobody had: the same scores. In the basket before, they are others."""
    generated(str(tmp_path / "a"), users=30, items=24, kinds=3)
    events = read_jsonl(tmp_path / "a" / "events.jsonl")
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event["user"], []).append(event["time"])

    def replanted(name: str, place: int) -> Path:
        changed = [
            event | {"item": "item7"} if event["time"] == sorted(set(times[event["user"]]))[place] else event
            for event in events
        ]
        write_jsonl(tmp_path / f"{name}.jsonl", changed)
        prepare(str(tmp_path / name), events=str(tmp_path / f"{name}.jsonl"), items=str(tmp_path / "a" / "items.jsonl"))
        return tmp_path / name

    def all_scores(place: Path) -> dict[str, np.ndarray]:
        known = [*histories.load(str(place / "histories.jsonl")).items()]
        names = [f"item{n}" for n in range(24)]
        train = Purchases.of(known, names)
        return {name: fit(name, SMALL.get(name, {}), train)(train) for name in BASELINES}

    honest, future, past = map(all_scores, (tmp_path / "a", replanted("future", -1), replanted("past", -2)))
    for name in BASELINES:
        np.testing.assert_array_equal(honest[name], future[name], err_msg=name)
        assert not np.allclose(honest[name], past[name]), name
