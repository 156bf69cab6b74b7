"""How good a ranked list of items is, beside what the user then did.

The one idea: every measure is one number a user, so two models are compared user by user, and what is said of their difference has an interval.
Coverage alone is of all lists together.
"""

from collections.abc import Mapping, Sequence

import numpy as np

MEASURES = ("hr", "recall", "ndcg", "mrr", "revenue_recall", "diversity", "coverage")


def measures(ranked: Sequence[int], wanted: Mapping[int, float], k: int) -> dict[str, float]:
    """Of one list, best first, its items once each; `wanted`: item → what it is worth. HR (any is there), recall, NDCG (gains of 0 and 1, Järvelin and
    Kekäläinen 2002), MRR (1 / place of the first), and the share of the worth that is there, at k each."""
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


def diversity(vectors: np.ndarray) -> float:
    """Mean of 1 − cosine over the pairs of a list's items, [k, d] of unit length; 0 for fewer than two."""
    k = len(vectors)
    if k < 2:
        return 0.0
    whole = vectors.sum(0)
    return float(1 - (whole @ whole - (vectors * vectors).sum()) / (k * (k - 1)))


def coverage(lists: Sequence[Sequence[int]], items: int) -> float:
    """Share of the catalogue that is in any of the lists."""
    return len({item for ranked in lists for item in ranked}) / items


def interval(differences: np.ndarray, *, draws: int = 10_000, seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """Mean over users of [n] paired differences, and the ends of its percentile bootstrap interval (Efron 1979)."""
    rng, n = np.random.default_rng(seed), len(differences)
    means = np.concatenate([differences[rng.integers(0, n, (min(500, draws - at), n))].mean(1) for at in range(0, draws, 500)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(differences.mean()), float(low), float(high)
