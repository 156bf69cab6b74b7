"""Metrics of a ranked list of items, compared with the user's next basket.

Every measure is one number per user, so two models can be compared user by user, and their difference has a confidence
interval. Only coverage is computed from all lists together.
"""

from collections.abc import Mapping, Sequence

import numpy as np

TASKS = ("all", "new")  # all items, and those that the user has not had
MEASURES = ("hr", "recall", "ndcg", "mrr", "revenue_recall", "diversity", "coverage")


def measures(ranked: Sequence[int], wanted: Mapping[int, float], k: int) -> dict[str, float]:
    """Return the measures of one list, best item first, without repetitions; `wanted` maps items to their value.

    They are HR (1 if any wanted item is in the list), recall, NDCG (gains of 0 and 1, Järvelin and Kekäläinen 2002),
    MRR (1 / rank of the first hit), and the share of the wanted value that is in the list, each at k.
    """
    hits = np.array([item in wanted for item in ranked[:k]], float)
    discounts = 1 / np.log2(np.arange(2, k + 2))
    first = np.flatnonzero(hits)
    worth = sum(wanted.values())
    return {
        f"hr@{k}": float(hits.any()),
        f"recall@{k}": float(hits.sum() / len(wanted)),
        f"ndcg@{k}": float((hits * discounts[: len(hits)]).sum() / discounts[: len(wanted)].sum()),
        f"mrr@{k}": float(1 / (first[0] + 1)) if len(first) else 0.0,
        f"revenue_recall@{k}": float(sum(wanted.get(item, 0.0) for item in ranked[:k]) / worth) if worth else 0.0,
    }


def with_value(scores: np.ndarray, values: np.ndarray, weight: float) -> np.ndarray:
    """Return log-probs [.., items] + weight · log(values [items]); an item of value 0 has −inf. Without a weight,
    the log-probs are unchanged."""
    with np.errstate(divide="ignore"):
        return scores + weight * np.log(values) if weight else scores


def diversity(vectors: np.ndarray) -> float:
    """Return the mean of 1 − cosine over all pairs of vectors, which are [k, d] of unit length.

    It is 0 for fewer than two vectors.
    """
    k = len(vectors)
    if k < 2:
        return 0.0
    whole = vectors.sum(0)
    return float(1 - (whole @ whole - (vectors * vectors).sum()) / (k * (k - 1)))


def coverage(lists: Sequence[Sequence[int]], items: int) -> float:
    """Return the share of the catalogue's items that are in at least one of the lists."""
    return len({item for ranked in lists for item in ranked}) / items


def interval(
    differences: np.ndarray, *, draws: int = 10_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of [n] paired differences, one per user, and the ends of its percentile bootstrap interval.

    The bootstrap is that of Efron (1979).
    """
    rng, n = np.random.default_rng(seed), len(differences)
    means = np.concatenate(
        [differences[rng.integers(0, n, (min(500, draws - at), n))].mean(1) for at in range(0, draws, 500)]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(differences.mean()), float(low), float(high)
