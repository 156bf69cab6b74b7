"""Where a tool call may begin: the first of several marks in a text, also one that the text's end cuts."""

from collections.abc import Sequence


def first(text: str, marks: Sequence[str], start: int = 0, end: int | None = None) -> int:
    """Return the position of the first of the marks between `start` and `end`; `end` where there is none.

    Without `end`, it is the text's length.
    """
    end = len(text) if end is None else end
    for mark in marks:  # each is searched only before those found; marks do not overlap
        found = text.find(mark, start, end)
        end = found if found >= 0 else end
    return end


def before(text: str, marks: Sequence[str]) -> str:
    """Return the text before the first mark, or before an end of the text with which a mark may begin."""
    head = text[: first(text, marks)]
    return without_begun(text, marks) if len(head) == len(text) else head


def without_begun(text: str, marks: Sequence[str]) -> str:
    """Return the text without an end with which a mark may begin."""
    begun = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - begun]


def certain_if_stripped(text: str, marks: Sequence[str]) -> str:
    """Return what is certain of content that is stripped where calls follow, and unchanged where none do.

    White space at the end waits for what follows it. After white space at the beginning nothing is certain: it is
    content only if no call ever comes.
    """
    return "" if text[:1].isspace() else before(text, marks).rstrip()
