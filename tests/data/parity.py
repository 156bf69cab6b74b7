"""The ids that ptf trains on, beside those that AutoTokenizer makes of the files that ptf writes.

What trains is a tokenizer in memory, with the tokens that the job added to it; what serves is another one, read by
transformers from the directory that was published. Both are asked about the same texts: by the batch, as data are
encoded, and some as whole documents.
"""

import os
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptf.config.sections.model import TokensConfig
from ptf.data.added import tokenizer_of, wanted
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.encode import encode_document
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.texts import fuzzed
from tests.tiny import codes

REAL = ("qwen3", "gpt2", "phi3-mini", "minimind")
CHARACTERS = string.ascii_letters + string.digits + " .,+-=\n\t"
# of which one begins another, and some are made of what texts have anyway
ADDED = ["<buy>", "<buy_2>", "price:", "数", " mid space ", "É"]
DOCUMENTS = 50  # of the texts, one in so many is encoded as a document too


@dataclass(frozen=True)
class Pair:
    """`ours` trains, `theirs` is AutoTokenizer's; texts are made of `alphabet`, or of anything, and of `more`."""

    name: str
    ours: Tokenizer
    theirs: Any
    more: tuple[str, ...] = ()
    alphabet: str = ""

    def texts(self, seed: int, count: int) -> list[str]:
        rng = random.Random(f"{self.name} {seed}")
        if self.alphabet:
            words = (*self.more, *self.alphabet)
            return ["".join(rng.choice(words) for _ in range(rng.randint(1, 40))) for _ in range(count)]
        return [fuzzed(rng, self.more) for _ in range(count)]


def pairs(scratch: Path, shared: Path | None = None, *, once: bool = False) -> Iterator[Pair]:
    """Of a tokenizer of characters; where `shared` has them, of real ones too, each as it is and with added tokens and
    semantic ids (`once`: in turns the one or the other)."""
    from transformers import AutoTokenizer

    character_tokenizer(CHARACTERS, scratch / "characters")
    semantic = TokensConfig(added=[*ADDED, *codes(40, 40, 8)])
    plans: list[tuple[str, Path, TokensConfig | None, str]] = [("characters", scratch / "characters", None, CHARACTERS)]
    plans.append(("characters, semantic ids", scratch / "characters", TokensConfig(added=codes(9, 9)), CHARACTERS))
    for number, name in enumerate(REAL if shared is not None else ()):
        of_name = [
            (name, shared / "tokenizers" / name, None, ""),
            (f"{name}, added tokens and semantic ids", shared / "tokenizers" / name, semantic, ""),
        ]
        plans += of_name[number % 2 :: 2] if once else of_name
    for name, place, tokens, alphabet in plans:
        ours = tokenizer_of(str(place), tokens)
        ours.save(scratch / "saved" / name)
        theirs = AutoTokenizer.from_pretrained(scratch / "saved" / name, local_files_only=True, trust_remote_code=False)
        yield Pair(name, ours, theirs, tuple(wanted(tokens)) if tokens else (), alphabet)


def compared(pair: Pair, seed: int, count: int) -> dict[str, Any]:
    """How many texts were compared, refused by ptf, and how many differ in an id;
    and how often an added token was among them."""
    texts = pair.texts(seed, count)
    known = {i for text in pair.more for i in pair.ours.encode(text)[:1]} if pair.more else set()
    refused, differ, added = 0, list[str](), 0
    try:
        ours = pair.ours.encode_all(texts)
    except UserError:  # one of them cannot be encoded
        ours = [encoded(pair.ours, text) for text in texts]
    theirs = pair.theirs(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for text, mine, yours in zip(texts, ours, theirs, strict=True):
        refused += mine is None
        added += mine is not None and not known.isdisjoint(mine)
        if mine is not None and mine != yours:
            differ.append(text)
    documents = [text for text, mine in zip(texts, ours, strict=True) if mine is not None][::DOCUMENTS]
    begun = pair.theirs(documents, verbose=False)["input_ids"] if documents else []
    for text, ids in zip(documents, begun, strict=True):
        (sample,) = encode_document({"text": text}, pair.ours)[0]
        trained = sample.tokens.tolist()
        behind = (
            trained[len(ids) :]
            if trained[: len(ids)] == ids
            else trained[len(ids) - 1 :]
            if ids[-1] in pair.ours.stop_ids
            else None
        )
        # what follows is the end of the text, at most
        if behind is None or len(behind) > 1 or not set(behind) <= set(pair.ours.stop_ids):
            differ.append(text)
    return {
        "texts": count,
        "documents": len(documents),
        "refused": refused,
        "with_added": added,
        "differ": len(differ),
        "first": differ[:3],
    }


def encoded(tokenizer: Tokenizer, text: str) -> list[int] | None:
    try:
        return tokenizer.encode(text)
    except UserError:
        return None


def shared_data() -> Path | None:
    place = Path(os.environ.get("PTF_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
    return place if (place / "tokenizers").is_dir() else None
