"""A catalogue in the order in which a model expects its items next, after each of some histories.

The one idea: an item's score is the log-probability of its tokens among those that items may be made of, which is what constrained decoding draws
from. Items of one token are all scored; of ids of several tokens a beam is kept on each level.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptf import storage
from ptf.data.catalogue import Catalogue, items_vectors
from ptf.data.ranking import coverage, diversity, measures
from ptf.data.trajectory import Prompt
from ptf.data.trie import Trie
from ptf.errors import UserError
from ptf.rl.native_engine import NativeEngine

TASKS = ("all", "new")  # all items, and those that the user has not had


@dataclass(frozen=True)
class Ranker:
    engine: NativeEngine
    trie: Trie
    item_of: np.ndarray  # [states]: the place in the catalogue of the item that ends in this state of the trie, −1 where none does
    beam: int
    histories: int = 64  # at once

    @staticmethod
    def of(engine: NativeEngine, catalogue: Catalogue, tokenizer: Any, beam: int) -> "Ranker":
        trie = catalogue.trie(tokenizer)
        item_of = np.full(len(trie.starts) - 1, -1)
        for place, ids in enumerate(tokenizer.encode_all([item.text for item in catalogue.items])):
            state = 0
            for token in ids:
                state = trie.follow(state, token)
            item_of[state] = place
        return Ranker(engine, trie, item_of, beam)

    def __call__(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, np.ndarray]]:
        """Which prompt, and its scores of all items, [items] float64, −inf for those that the beam has lost; as they are found."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        for at in range(0, len(order), self.histories):
            here = order[at : at + self.histories]
            yield from zip(here, self._scores([prompts[i].tokens for i in here]), strict=True)

    def _scores(self, contexts: Sequence[np.ndarray]) -> np.ndarray:
        scores = np.full((len(contexts), int((self.item_of >= 0).sum())), -np.inf)
        for owner, states, found in self.engine.levels(contexts, self.trie, self.beam):
            ended = self.item_of[states] >= 0
            scores[owner[ended], self.item_of[states[ended]]] = found[ended]
        return scores


def top(scores: np.ndarray, k: int) -> list[int]:
    """The best k of those that have a score, equal ones in the catalogue's order."""
    best = np.argsort(-scores, kind="stable")[:k]
    return best[np.isfinite(scores[best])].tolist()


def judged(
    score: Callable[[Sequence[Prompt]], Iterator[tuple[int, np.ndarray]]], prompts: Sequence[Prompt], catalogue: Catalogue, vectors: np.ndarray, k: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:  # fmt: skip
    """Means over the users of all measures, of next baskets over all items (`all/…`) and over items that are new to the user (`new/…`, of users whose
    basket has one); and the measures of each user. Raises UserError for prompts without a future of this catalogue."""
    place = {item.name: i for i, item in enumerate(catalogue.items)}
    rows: dict[int, dict[str, Any]] = {}
    lists: dict[str, list[list[int]]] = {task: [] for task in TASKS}
    for number, scores in score(prompts):
        prompt = prompts[number]
        try:
            basket = [place[name] for name in prompt.row["future"][0]]
            had = [place[name] for name in prompt.row["history"]]
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"a held-out history needs `history` and `future`, of items of the catalogue (ptf.data.events writes them); this one, of source "
                f"{prompt.source}, has {str({key: prompt.row.get(key) for key in ('history', 'future')})[:120]}"
            ) from None
        row: dict[str, Any] = {"user": prompt.row.get("user")}
        unseen = scores.copy()
        unseen[had] = -np.inf
        for task, those, wanted in (("all", scores, basket), ("new", unseen, [item for item in basket if item not in set(had)])):
            if not wanted:
                continue
            ranked = top(those, k)
            lists[task].append(ranked)
            found = measures(ranked, {item: catalogue.items[item].value for item in wanted}, k) | {f"diversity@{k}": diversity(vectors[ranked])}
            row |= {f"{task}/{name}": value for name, value in found.items()} | {f"{task}/top": [catalogue.items[item].name for item in ranked]}
        rows[number] = row
    found_rows = [rows[number] for number in range(len(prompts))]
    names = [name for row in found_rows for name, value in row.items() if isinstance(value, float)]
    means = {name: float(np.mean([row[name] for row in found_rows if name in row])) for name in dict.fromkeys(names)}
    return means | {f"{task}/coverage@{k}": coverage(lists[task], len(place)) for task in TASKS if lists[task]}, found_rows


def rank(
    model: Path, *, tokenizer: Any, prompts: Sequence[Prompt], catalogue: str, k: int, beam: int, device: torch.device, parts: Any, answers: Path
) -> dict[str, float]:
    """The measures of one checkpoint, and of each user in `answers` (jsonl)."""
    items = Catalogue.load(catalogue)
    items.refuse_other(tokenizer, "the model's")
    vectors = items_vectors(catalogue)
    engine = NativeEngine(str(model), device=device, dtype=torch.float32, version=0, parts=parts)
    means, rows = judged(Ranker.of(engine, items, tokenizer, beam), prompts, items, vectors, k)
    storage.write_text(str(answers), "".join(json.dumps(row) + "\n" for row in rows))
    return means
