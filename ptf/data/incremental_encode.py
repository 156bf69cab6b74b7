"""Token ids of texts that mostly repeat the text before them, as the renders of a conversation turn by turn do.

A special token splits a text into two parts that are encoded independently. Two texts that are equal up to a special
token therefore have equal ids up to it, and only the rest is encoded, for all texts in one call. A conversation of n
turns then costs about one encoding, not n, and a system message or tools that conversations share are encoded once
where one follows the other. Whether a tokenizer has this property is tested, not assumed (`Tokenizer.cuts`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from ptf.data.tokenizer import Tokenizer


def encode_incrementally(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return for each text what `tokenizer.encode` returns."""
    before, ids_before = tokenizer.last_encoded  # of the conversation before: read once, as threads may encode, too
    rests, cuts = [], []
    for text in texts:
        common = common_prefix_length(before, text)
        start, cut = max(((text.rfind(cut, 0, common), cut) for cut in tokenizer.cuts), default=(-1, ""))
        rests.append(text[max(start, 0) :])
        cuts.append((cut, text.count(cut, 0, start)) if start >= 0 else None)  # the cut, and its count before `start`
        before = text
    encoded: list[list[int]] = []
    for ids, cut_position in zip(tokenizer.encode_all(rests), cuts, strict=True):
        if cut_position is not None:
            k = -1
            for _ in range(cut_position[1] + 1):
                k = ids_before.index(tokenizer.cuts[cut_position[0]], k + 1)
            ids = ids_before[:k] + ids
        encoded.append(ids)
        ids_before = ids
    if encoded:
        tokenizer.last_encoded = (before, ids_before)
    return encoded


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how much at the start of two texts, or of two lists, is equal."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda n: a[: n + 1] != b[: n + 1])
