"""Texts that tokenizers may disagree about."""

import random
from collections.abc import Sequence

PIECES = (
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\xa0",
    "\u200b",
    "\ufeff",
    "the",
    " the",
    "The",
    "don't",
    "naïve",
    "Ångström",
    "ﬁ",
    "①",
    "数学",
    "русский",
    "العربية",
    "हिन्दी",
    "ภาษา",
    "👩‍👩‍👧",
    "🇫🇷",
    "é",
    "é",
    "1",
    "42",
    "3.14159",
    "1e-10",
    "0x1F",
    "x = y;",
    "def f(a, b):",
    "</s>",
    "<s>",
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<think>",
    "<|user|>",
    "[INST]",
    "{{",
    "}}",
    "\\n",
    "\x00",
    "\x7f",
    "—",
    "“",
    "”",
    "…",
    "ß",
    "İ",
    "ǅ",
    "a" * 40,
    "!" * 9,
    "https://a.b/c?d=e&f",
    "ｆｕｌｌ",
    "Ⅻ",
    "힣",
)


def fuzzed(rng: random.Random, more: Sequence[str] = ()) -> str:
    """Words, numbers, code, whitespace, many scripts, emoji, control characters, what looks like special tokens,
    and `more`."""
    found = []
    for _ in range(rng.randint(1, 24)):
        if more and rng.random() < 0.3:
            found.append(rng.choice(more))
        elif rng.random() < 0.85:
            found.append(rng.choice(PIECES))
        else:
            found.append(
                chr(rng.choice((rng.randint(1, 0x2FF), rng.randint(0x370, 0xD7FF), rng.randint(0xE000, 0x1FBFF))))
            )
    return "".join(found)
