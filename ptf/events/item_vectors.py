"""Vectors of items, from their descriptions and from the baskets that they share with other items.

Both are factors of a sparse table (Deerwester et al. 1990), computed by scikit-learn. An item without a description, or
that is in no basket, has a vector of zeros there.
"""

from collections.abc import Sequence

import numpy as np


def item_vectors(baskets: Sequence[Sequence[int]], texts: Sequence[str], width: int, seed: int = 0) -> np.ndarray:
    """Return the vectors of items, [items, d ≤ width] of unit length.

    They are the concatenation of the co-occurrence vectors and, with half the weight, the vectors of the descriptions.
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
    """Pad vectors [n, d ≤ width] to [n, width] float32 and rotate them randomly, so that all dimensions are used.

    Lengths and angles do not change.
    """
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
    return (np.pad(vectors, ((0, 0), (0, width - vectors.shape[1]))) @ rotation).astype(np.float32)


def text_vectors(texts: Sequence[str], seed: int, width: int) -> np.ndarray:
    """Return vectors [items, d ≤ width] of unit length, from TF-IDF of words and word pairs.

    An item without text gets zeros.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        table = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b").fit_transform(
            texts
        )
    except ValueError:  # no text has a word
        return np.zeros((len(texts), 1))
    return _factors(table, seed, width)


def cooccurrence_vectors(baskets: Sequence[Sequence[int]], items: int, seed: int, width: int) -> np.ndarray:
    """Return vectors [items, d ≤ width] of unit length, from the baskets that items share.

    They are factors of the positive pointwise mutual information of two items being in one basket (Levy and Goldberg
    2014). An item that is in no basket gets zeros.
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
