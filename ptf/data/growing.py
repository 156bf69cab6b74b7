"""Ids of texts that mostly repeat the text before them, as the renders of a conversation turn by turn do.

The one idea: a special token cuts a text in two that are encoded independently. So what is equal up to a special token has equal ids up to it, and
only the rest is encoded. A conversation of n turns then costs about one encoding, not n. Whether a tokenizer keeps to that is tried out, not assumed.
"""

from bisect import bisect_left

from ptf.data.tokenizer import Tokenizer


class GrowingText:
    """`encode` gives what `tokenizer.encode` gives."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._text = ""
        self._ids: list[int] = []

    def encode(self, text: str) -> list[int]:
        common = _common(self._text, text)
        at, cut = max(((text.rfind(cut, 0, common), cut) for cut in self.tokenizer.cuts), default=(-1, ""))
        if at < 0:
            ids = self.tokenizer.encode(text)
        else:
            k = -1
            for _ in range(text.count(cut, 0, at) + 1):  # the cut's place among the ids
                k = self._ids.index(self.tokenizer.cuts[cut], k + 1)
            ids = self._ids[:k] + self.tokenizer.encode(text[at:])
        self._text, self._ids = text, ids
        return ids


def _common(a: str, b: str) -> int:
    """Characters that two texts begin with in common."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda n: a[: n + 1] != b[: n + 1])
