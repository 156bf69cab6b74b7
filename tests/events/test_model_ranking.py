"""A catalogue's order by a model: the scores are what the model says of every item,
however its id is made and whatever is beside it in the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptf.config import Plugin
from ptf.config.plugin import bind
from ptf.config.sections.model import ModelConfig, TokensConfig
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue
from ptf.events.model_ranking import Ranker, evaluate_ranking, rank, top
from ptf.events.prepare import generated
from ptf.model.sampling import NEVER
from ptf.rl.engines.kv_cache import Cache
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import Request, Sampling, edges_of
from ptf.train.model_source import StartingModel
from tests.tiny import read_jsonl


@pytest.fixture(scope="module", params=["items", {"levels": [5, 3]}], ids=["items", "semantic"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_model(tmp_path_factory.mktemp("ranking"), request.param)


def prepared_model(at: Path, ids: Any) -> Path:
    """A prepared catalogue with a model that has weights, in `extended`."""
    generated(str(at / "made"), users=20, items=24, kinds=3, ids=ids, window=64)
    tokens = TokensConfig(file=str(at / "made/tokens.jsonl"), init=str(at / "made/tokens.safetensors"))
    model = ModelConfig(path=str(at / "made/model"), init="random", tokens=tokens)
    place = at / "made/model"
    start = StartingModel(model, place, tokenizer_path=str(place), run=at).extended(tokens)
    assert start.directory == at / "extended"
    return at


def asked(place: Path) -> tuple[Tokenizer, Catalogue, list[Prompt]]:
    tokenizer = Tokenizer.load(str(place / "extended"))
    rows = read_jsonl(place / "made/held_out.jsonl")
    tokens = [np.array(tokenizer.render(row["messages"], True), np.int32) for row in rows]
    return (
        tokenizer,
        Catalogue.load(str(place / "made/catalogue.json")),
        [Prompt(t, row, "next", i) for i, (t, row) in enumerate(zip(tokens, rows, strict=True))],
    )


def engine_of(place: Path) -> NativeEngine:
    return NativeEngine(str(place / "extended"), device=torch.device("cpu"), dtype=torch.float32, version=0)


def by_hand(engine: NativeEngine, catalogue: Catalogue, tokenizer: Tokenizer, context: np.ndarray) -> np.ndarray:
    """Of every item the log-probs of its tokens, from a forward pass of its own, among those that the trie allows."""
    trie, found = catalogue.trie(tokenizer), []
    for item in catalogue.items:
        ids = tokenizer.encode(item.text)
        logits = engine._prefill(
            [np.array([*context, *ids[:n]], np.int32) for n in range(len(ids))], _cache(engine, context, ids).prefill
        ).double()
        states, total = trie.walked(ids)[:, 0], 0.0
        for n, token in enumerate(ids):
            allowed = torch.full_like(logits[n], NEVER)
            allowed[trie.allowed(int(states[n]))] = logits[n][trie.allowed(int(states[n]))]
            total += float(allowed.log_softmax(-1)[token])
        found.append(total)
    return np.array(found)


def _cache(engine: NativeEngine, context: np.ndarray, ids: list[int]) -> Any:
    return Cache(
        engine.model.config, [len(context) + n for n in range(len(ids))], 1, torch.device("cpu"), torch.float32
    )


def scored(ranker: Ranker, prompts: list[Prompt]) -> list[np.ndarray]:
    """In the order of the prompts."""
    found = dict(ranker(prompts))
    return [found[i] for i in range(len(prompts))]


def test_scores_are_what_a_forward_pass_of_each_item_says(place: Path) -> None:
    tokenizer, catalogue, prompts = asked(place)
    engine = engine_of(place)
    found = scored(Ranker(engine, catalogue, tokenizer, beam=100), prompts)
    for prompt, scores in list(zip(prompts, found, strict=True))[:3]:
        np.testing.assert_allclose(scores, by_hand(engine, catalogue, tokenizer, prompt.tokens), atol=1e-5)
        assert np.exp(scores).sum() == pytest.approx(1.0, abs=1e-5), "something of the catalogue is said"
    (alone,) = scored(Ranker(engine, catalogue, tokenizer, beam=100), prompts[:1])
    np.testing.assert_allclose(alone, found[0], atol=1e-5)


def test_items_of_one_token_are_scored_as_by_the_trie(place: Path) -> None:
    tokenizer, catalogue, prompts = asked(place)
    engine, trie = engine_of(place), catalogue.trie(tokenizer)
    ranker = Ranker(engine, catalogue, tokenizer, beam=100)
    if catalogue.items[0].text.count("<") > 1:
        assert ranker.longest > 1
        return
    contexts = [prompt.tokens for prompt in prompts]
    ((owner, states, of_states),) = engine.levels(contexts, trie, 100)
    found = np.full((len(contexts), len(catalogue.items)), np.nan)
    for index, item in enumerate(catalogue.items):
        at = states == trie.follow(0, tokenizer.encode(item.text)[0])
        found[owner[at], index] = of_states[at]
    np.testing.assert_allclose(np.array(scored(ranker, prompts)), found, atol=1e-6)
    assert np.ptp(found, axis=0).max() > 1e-3, "histories differ"


@given(st.lists(st.sampled_from([-np.inf, -2.0, -1.5, -1.0, 0.0]), min_size=1, max_size=40), st.integers(1, 45))
def test_the_best_are_those_of_a_stable_sort(scores: list[float], k: int) -> None:
    expected = [int(i) for i in np.argsort(-np.array(scores), kind="stable")[:k] if np.isfinite(scores[i])]
    for dtype in (np.float32, np.float64):
        assert top(np.array(scores, dtype), k) == expected


class Told:
    """A head that takes contexts, and keeps them beside its logits."""

    takes_contexts = True

    def __init__(self, head: Any, kept: list[tuple[np.ndarray, torch.Tensor]]) -> None:
        self.head, self.kept = head, kept

    def logits(self, x: torch.Tensor, contexts: list[np.ndarray]) -> torch.Tensor:
        logits = self.head.logits(x)
        self.kept += zip(contexts, logits.clone(), strict=True)
        return logits


@pytest.mark.parametrize("how", ["levels", "batch", "continuous"])
def test_the_contexts_of_a_head_are_all_tokens_to_its_states(place: Path, how: str) -> None:
    """Of turns over a cache too: whole contexts give the logits that the turn had."""
    tokenizer, catalogue, prompts = asked(place)
    plain, told, kept = engine_of(place), engine_of(place), []
    if how == "continuous":
        told = NativeEngine(
            str(place / "extended"), device=torch.device("cpu"), dtype=torch.float32, version=0, continuous=True
        )
    forward = told.model.forward
    told.model.forward = lambda tokens, positions, segments, head_fn, attend: forward(  # type: ignore[method-assign]
        tokens, positions, segments, lambda x, head: head_fn(x, Told(head, kept)), attend
    )
    contexts = [prompt.tokens for prompt in prompts[:3]]
    if how == "levels":
        [*told.levels(contexts, catalogue.trie(tokenizer), 4)]
    else:
        sampling = Sampling(5, 1.0, tokenizer.stop_ids)
        requests = [Request(context, sampling, n) for n, context in enumerate(contexts)]
        if how == "batch":
            told.answer(requests)
        else:
            numbers = told.add(requests, [False] * 3)
            while told.continuous and (told.continuous.waiting or told.continuous.responses):
                told.step()
            assert len(numbers) == 3
    assert len(kept) > 3 or (how == "levels" and len(tokenizer.encode(catalogue.items[0].text)) == 1)
    whole = plain.next_logits([context for context, _ in kept])
    found = torch.stack([logits for _, logits in kept])
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
    shorter = plain.next_logits([context[:-1] for context, _ in kept])
    assert (found - shorter).abs().amax(1).min() > 1e-3, "negative control: a token less"


def test_a_narrow_beam_loses_items_but_not_their_scores(place: Path) -> None:
    tokenizer, catalogue, prompts = asked(place)
    engine = engine_of(place)
    wide, narrow = (scored(Ranker(engine, catalogue, tokenizer, beam), prompts[:5]) for beam in (100, 2))
    for a, b in zip(wide, narrow, strict=True):
        kept = np.isfinite(b)
        np.testing.assert_allclose(b[kept], a[kept], atol=1e-5)
        assert kept.any()
    if catalogue.items[0].text.count("<") > 1:
        assert not all(np.isfinite(b).all() for b in narrow)


def test_what_is_drawn_under_the_trie_is_always_an_item_and_as_likely_as_its_score(place: Path) -> None:
    """And as likely to the trainer, under the same restriction."""
    tokenizer, catalogue, prompts = asked(place)
    engine = engine_of(place)
    trie = catalogue.trie(tokenizer)
    sampling = Sampling(trie.longest, 1.0, tokenizer.stop_ids, trie=trie)
    generations = engine.answer([Request(p.tokens, sampling, seed) for p in prompts for seed in range(8)])
    scores = scored(Ranker(engine, catalogue, tokenizer, beam=100), prompts)
    names = {item.text: i for i, item in enumerate(catalogue.items)}
    for i, generation in enumerate(generations):
        (item,) = catalogue.read(tokenizer.decode(generation.sampled_ids))
        assert item is not None
        assert generation.logprobs.sum() == pytest.approx(scores[i // 8][names[item.text]], abs=1e-5)
    assert len(edges_of(trie).tokens) == len(trie.tokens)


def test_a_users_measures_are_of_the_list_that_the_scores_make(place: Path, tmp_path: Path) -> None:
    tokenizer, catalogue, prompts = asked(place)
    names = [item.name for item in catalogue.items]

    def oracle(prompts: Any) -> Any:
        """Scores that put the basket first."""
        for number, prompt in reversed(list(enumerate(prompts))):
            yield number, np.array([float(name in prompt.row["future"][0]) for name in names])

    means, rows = evaluate_ranking(oracle, prompts, catalogue, np.eye(len(names)), 10)
    assert means["all/ndcg@10"] == pytest.approx(1.0)
    assert means["new/ndcg@10"] == pytest.approx(1.0)
    assert len(rows) == len(prompts)
    worst, _ = evaluate_ranking(
        lambda ps: ((number, -scores) for number, scores in oracle(ps)), prompts, catalogue, np.eye(len(names)), 5
    )
    assert worst["all/hr@5"] == 0
    for row, prompt in zip(rows, prompts, strict=True):
        assert not set(row.get("new/top", ())) & set(prompt.row["history"]), "what a user had is not new"
    assert top(np.array([1.0, -np.inf, 3.0]), 3) == [2, 0]
    found = rank(
        place / "extended",
        tokenizer=tokenizer,
        prompts=prompts,
        catalogue=str(place / "made/catalogue.json"),
        k=10,
        value_weight=0.0,
        device=torch.device("cpu"),
        factory=None,
        answers=tmp_path / "rows.jsonl",
    )
    assert 0 <= found["all/ndcg@10"] < 1
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(prompts)
    with pytest.raises(UserError, match="needs `history` and `future`, of items of the catalogue"):
        evaluate_ranking(
            oracle,
            [Prompt(prompts[0].tokens, {"history": ["?"], "future": [["?"]]}, "next", 0)],
            catalogue,
            np.eye(len(names)),
            5,
        )


def test_nothing_later_is_seen(place: Path) -> None:
    """The model's scores after a history are the same whatever follows it in the row; planted in the history itself,
    it is seen."""
    tokenizer, _, prompts = asked(place)
    engine = engine_of(place)
    told = {p.row["user"]: (p.row["messages"][0]["content"], p.row["told"][0]) for p in prompts[:4]}
    both = [np.array(tokenizer.encode(before + after), np.int32) for before, after in told.values()]
    positions = [len(tokenizer.encode(before)) - 1 for before, _ in told.values()]
    changed = [np.concatenate([row[: at + 1], row[at + 1 :][::-1]]) for row, at in zip(both, positions, strict=True)]
    planted = [np.concatenate([row[at + 1 :], row[: at + 1]]) for row, at in zip(both, positions, strict=True)]

    def hidden(rows: list[np.ndarray]) -> list[torch.Tensor]:
        batch = engine._packed(rows)
        x = engine.model(batch.tokens, batch.positions, batch.segments, lambda x, head: x)[0]
        return list(x.split(batch.lengths))

    with torch.no_grad():
        a, b, c = hidden(both), hidden(changed), hidden(planted)
    for row, at in enumerate(positions):
        torch.testing.assert_close(a[row][: at + 1], b[row][: at + 1], rtol=0, atol=1e-5)
        assert not torch.allclose(a[row][at], c[row][-1], atol=1e-3)


def test_plugs_of_slates_are_found() -> None:
    assert bind(Plugin(use="ptf.tasks.slates:revenue", args={"catalogue": "x"}))
