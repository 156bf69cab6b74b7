"""Ranking of a catalogue by a model, given users' histories.

An item's score is the log-probability of its tokens under constrained decoding, which allows only tokens of items.
Items of one token are all scored; for items of several tokens, a beam of prefixes is kept on each level.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptf import storage
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue, load_item_vectors
from ptf.events.ranking_metrics import TASKS, coverage, diversity, measures, with_value
from ptf.rl.engines.native import NativeEngine

BEAM = 100  # beginnings of items that are kept on each level
BATCH = 64  # histories that are scored at once


class Ranker:
    """Scores the items of a catalogue with a model. Raises UserError if the tokenizer is not the catalogue's."""

    def __init__(self, engine: NativeEngine, catalogue: Catalogue, tokenizer: Any, beam: int) -> None:
        catalogue.raise_if_different(tokenizer, "the tokenizer")
        self.engine, self.beam, self.items = engine, beam, len(catalogue.items)
        found = tokenizer.encode_all([item.text for item in catalogue.items])
        self.longest = max(map(len, found))  # tokens of an item
        if self.longest == 1:
            self.tokens = torch.tensor(found, device=engine.device)[:, 0]  # [items]
            return
        self.trie = catalogue.trie(tokenizer)
        # [states]: index of the item that ends in this state of the trie, −1 if none does
        self.item_of = np.full(len(self.trie.starts) - 1, -1)
        for index, ids in enumerate(found):
            self.item_of[functools.reduce(self.trie.follow, ids, 0)] = index

    def __call__(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index of a prompt and its scores of all items, [items], as they are computed.

        The score of an item that the beam has dropped is −inf.
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            contexts = [prompts[i].tokens for i in batch]
            scores = self._by_token(contexts) if self.longest == 1 else self._by_beam(contexts)
            yield from zip(batch, scores, strict=True)

    def _by_token(self, contexts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the scores of items that have one token each, [items] fp32, of each context."""
        for logits in self.engine.next_logits(contexts):  # one by one: 64 × 1,000,000 at once take 1.7 times as long
            yield logits.index_select(0, self.tokens).log_softmax(-1).cpu().numpy()

    def _by_beam(self, contexts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the scores of items of several tokens, [contexts, items] float64."""
        scores = np.full((len(contexts), self.items), -np.inf)
        for owner, states, level_scores in self.engine.levels(contexts, self.trie, self.beam):
            ended = self.item_of[states] >= 0
            scores[owner[ended], self.item_of[states[ended]]] = level_scores[ended]
        return scores


def top(scores: np.ndarray, k: int) -> list[int]:
    """Return the k items with the highest finite scores; items of equal score are in the catalogue's order."""
    if k >= len(scores):
        among = np.arange(len(scores))
    else:  # sort only those that may be in the list: to sort 1,000,000 takes 50 times as long
        least = max(np.partition(scores, -k)[-k], np.finfo(scores.dtype).min)
        among = np.flatnonzero(scores >= least)
    best = among[np.argsort(-scores[among], kind="stable")[:k]]
    return best[np.isfinite(scores[best])].tolist()


def evaluate_ranking(
    score: Callable[[Sequence[Prompt]], Iterator[tuple[int, np.ndarray]]],
    prompts: Sequence[Prompt],
    catalogue: Catalogue,
    vectors: np.ndarray,
    k: int,
    value_weight: float = 0.0,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the means of all measures over the users, and the measures of each user.

    The measures compare a ranking with the next basket: a ranking of all items (`all/…`), and one of items that are new
    to the user (`new/…`, for users whose basket has one). `value_weight`: see `with_value`. Raises UserError for a
    prompt whose row has no `history` or `future`, or has items that are not in the catalogue.
    """
    values = np.array([item.value for item in catalogue.items])
    index_of = {item.name: i for i, item in enumerate(catalogue.items)}
    rows: dict[int, dict[str, Any]] = {}
    lists: dict[str, list[list[int]]] = {task: [] for task in TASKS}
    for number, scores in score(prompts):
        prompt = prompts[number]
        try:
            basket = [index_of[name] for name in prompt.row["future"][0]]
            had = [index_of[name] for name in prompt.row["history"]]
        except (KeyError, IndexError, TypeError):
            raise UserError(
                "a held-out history needs `history` and `future`, of items of the catalogue (ptf.events.prepare writes "
                "them); this one, of source "
                f"{prompt.source}, has {str({key: prompt.row.get(key) for key in ('history', 'future')})[:120]}"
            ) from None
        rows[number] = row = {"user": prompt.row.get("user")}
        scores = with_value(scores, values, value_weight)
        unseen = scores.copy()
        unseen[had] = -np.inf
        tasks = {"all": (scores, basket), "new": (unseen, [item for item in basket if item not in set(had)])}
        for task, (task_scores, wanted) in tasks.items():
            if wanted:
                ranked = top(task_scores, k)
                lists[task].append(ranked)
                found = measures(ranked, {item: catalogue.items[item].value for item in wanted}, k)
                found[f"diversity@{k}"] = diversity(vectors[ranked])
                row |= {f"{task}/{name}": value for name, value in found.items()}
                row[f"{task}/top"] = [catalogue.items[item].name for item in ranked]
    ordered_rows = [rows[number] for number in range(len(prompts))]
    names = [name for row in ordered_rows for name, value in row.items() if isinstance(value, float)]
    means = {name: float(np.mean([row[name] for row in ordered_rows if name in row])) for name in dict.fromkeys(names)}
    means |= {f"{task}/coverage@{k}": coverage(lists[task], len(index_of)) for task in TASKS if lists[task]}
    return means, ordered_rows


def rank(
    model: Path,
    *,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    catalogue: str,
    k: int,
    value_weight: float,
    device: torch.device,
    factory: Any,
    answers: Path,
) -> dict[str, float]:
    """Return the mean measures of one checkpoint, and write those of each user to `answers` (jsonl). Of items of
    several tokens, `BEAM` beginnings are kept, and ten for each place of the list."""
    items = Catalogue.load(catalogue)
    items.raise_if_different(tokenizer, "the model's")
    vectors = load_item_vectors(catalogue)
    engine = NativeEngine(str(model), device=device, dtype=torch.float32, version=0, factory=factory)
    ranker = Ranker(engine, items, tokenizer, max(BEAM, 10 * k))
    means, rows = evaluate_ranking(ranker, prompts, items, vectors, k, value_weight)
    storage.write_text(str(answers), "".join(json.dumps(row) + "\n" for row in rows))
    return means
