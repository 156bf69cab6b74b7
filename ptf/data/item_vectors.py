"""Vectors of items: by what describes them, and by what they are had together with.

The one idea: both are factors of a sparse table (Deerwester et al. 1990), found by scikit-learn; a vector of zeros says that nothing is known.
"""

from collections.abc import Sequence

import numpy as np


def item_vectors(baskets: Sequence[Sequence[int]], texts: Sequence[str], width: int, seed: int = 0) -> np.ndarray:
    """[items, d ≤ width] of unit length: what they are had together with, and, counting half as much, what describes them."""
    of_text = max(1, width // 4)
    found = np.concatenate([together(baskets, len(texts), seed, width - of_text), 0.5 * described(texts, seed, of_text)], 1)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)


def spread(vectors: np.ndarray, width: int, seed: int = 0) -> np.ndarray:
    """[n, d ≤ width] → [n, width] float32, turned so that every dimension has a share of all of them; lengths and angles stay."""
    turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
    return (np.pad(vectors, ((0, 0), (0, width - vectors.shape[1]))) @ turn).astype(np.float32)


def described(texts: Sequence[str], seed: int, width: int) -> np.ndarray:
    """[items, d ≤ width] of unit length, from TF-IDF of words and pairs of words; zeros where there is no text."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not any(text.strip() for text in texts):
        return np.zeros((len(texts), 1))
    try:
        table = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b").fit_transform(texts)
    except ValueError:  # no words in any of them
        return np.zeros((len(texts), 1))
    return _factors(table, seed, width)


def together(baskets: Sequence[Sequence[int]], items: int, seed: int, width: int) -> np.ndarray:
    """[items, d ≤ width] of unit length, from how often two were in one basket beside how often they would have by chance (positive pointwise mutual
    information, Levy and Goldberg 2014); zeros for an item that never was."""
    from scipy.sparse import coo_matrix

    rows = np.repeat(np.arange(len(baskets)), [len(basket) for basket in baskets])
    had = coo_matrix((np.ones(len(rows)), (rows, [item for basket in baskets for item in basket])), shape=(len(baskets), items)).tocsr()
    both = (had.T @ had).tocoo()
    counts = np.maximum(both.diagonal(), 1.0)
    information = np.maximum(0.0, np.log(both.data * len(baskets) / (counts[both.row] * counts[both.col])))
    apart = both.row != both.col
    return _factors(coo_matrix((information[apart], (both.row[apart], both.col[apart])), shape=both.shape).tocsr(), seed, width)


def _factors(table, seed: int, width: int) -> np.ndarray:
    from sklearn.decomposition import TruncatedSVD

    most = min(width, min(table.shape) - 1)
    if most < 1 or not table.nnz:
        return np.zeros((table.shape[0], 1))
    found = TruncatedSVD(most, random_state=seed).fit_transform(table)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
