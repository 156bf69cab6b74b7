"""Ids of texts that mostly repeat the text before them, as the renders of a conversation turn by turn do.

The one idea: a special token cuts a text in two that are encoded independently. So what is equal up to a special token has equal ids up to it, and
only the rest is encoded, that of all the texts at once. A conversation of n turns then costs about one encoding, not n. Whether a tokenizer keeps
to that is tried out, not assumed.
"""

from bisect import bisect_left
from collections.abc import Sequence

from ptf.data.tokenizer import Tokenizer


def encode_growing(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Of each text what `tokenizer.encode` gives."""
    rests, cuts, before = [], [], ""
    for text in texts:
        common = common_length(before, text)
        at, cut = max(((text.rfind(cut, 0, common), cut) for cut in tokenizer.cuts), default=(-1, ""))
        rests.append(text[max(at, 0) :])
        cuts.append((cut, text.count(cut, 0, at)) if at >= 0 else None)  # which one, and how many of them come before
        before = text
    found: list[list[int]] = []
    for ids, place in zip(tokenizer.encode_all(rests), cuts, strict=True):
        if place is None:
            found.append(ids)
            continue
        k = -1
        for _ in range(place[1] + 1):
            k = found[-1].index(tokenizer.cuts[place[0]], k + 1)
        found.append(found[-1][:k] + ids)
    return found


def common_length(a: str, b: str) -> int:
    """Characters that two texts begin with in common."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda n: a[: n + 1] != b[: n + 1])
