"""Vectors of items, from their descriptions and from the items that they are bought together with.

Both are factors of a sparse table (Deerwester et al. 1990), computed by scikit-learn; a vector of zeros means that
nothing is known.
"""

from collections.abc import Sequence

import numpy as np


def item_vectors(baskets: Sequence[Sequence[int]], texts: Sequence[str], width: int, seed: int = 0) -> np.ndarray:
    """Return the vectors of items, [items, d ≤ width] of unit length.

    They join the co-occurrence vectors and, with half the weight, the vectors of the descriptions.
    """
    text_width = max(1, width // 4)
    joined = np.concatenate(
        [
            cooccurrence_vectors(baskets, len(texts), seed, width - text_width),
            0.5 * text_vectors(texts, seed, text_width),
        ],
        1,
    )
    return joined / np.maximum(np.linalg.norm(joined, axis=1, keepdims=True), 1e-9)


def rotate_to_width(vectors: np.ndarray, width: int, seed: int = 0) -> np.ndarray:
    """Return vectors [n, d ≤ width] as [n, width] float32, rotated so that every dimension has a share of all of them.

    Lengths and angles stay the same.
    """
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
    return (np.pad(vectors, ((0, 0), (0, width - vectors.shape[1]))) @ rotation).astype(np.float32)


def text_vectors(texts: Sequence[str], seed: int, width: int) -> np.ndarray:
    """Return vectors [items, d ≤ width] of unit length, from TF-IDF of words and word pairs.

    An item without text gets zeros.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not any(text.strip() for text in texts):
        return np.zeros((len(texts), 1))
    try:
        table = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b").fit_transform(
            texts
        )
    except ValueError:  # no words in any of them
        return np.zeros((len(texts), 1))
    return _factors(table, seed, width)


def cooccurrence_vectors(baskets: Sequence[Sequence[int]], items: int, seed: int, width: int) -> np.ndarray:
    """Return vectors [items, d ≤ width] of unit length, from the baskets that items share.

    The measure compares how often two items are in one basket with chance: it is positive pointwise mutual information
    (Levy and Goldberg 2014); an item that is in no basket gets zeros.
    """
    from scipy.sparse import coo_matrix

    rows = np.repeat(np.arange(len(baskets)), [len(basket) for basket in baskets])
    membership = coo_matrix(
        (np.ones(len(rows)), (rows, [item for basket in baskets for item in basket])), shape=(len(baskets), items)
    ).tocsr()
    both = (membership.T @ membership).tocoo()
    counts = np.maximum(both.diagonal(), 1.0)
    information = np.maximum(0.0, np.log(both.data * len(baskets) / (counts[both.row] * counts[both.col])))
    different = both.row != both.col
    return _factors(
        coo_matrix((information[different], (both.row[different], both.col[different])), shape=both.shape).tocsr(),
        seed,
        width,
    )


def _factors(table, seed: int, width: int) -> np.ndarray:
    """Return the factors of a sparse table, [rows, d ≤ width] of unit length."""
    from sklearn.decomposition import TruncatedSVD

    rank = min(width, min(table.shape) - 1)
    if rank < 1 or not table.nnz:
        return np.zeros((table.shape[0], 1))
    factors = TruncatedSVD(rank, random_state=seed).fit_transform(table)
    return factors / np.maximum(np.linalg.norm(factors, axis=1, keepdims=True), 1e-9)
