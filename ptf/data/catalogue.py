"""The items that there are: what each is called in tokens, what it is worth, and what describes it.

The one idea: a catalogue belongs to one tokenizer, whose fingerprint it keeps; with another one its names would be other tokens, and is refused.
"""

import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from ptf import storage
from ptf.data.tokenizer import END, EVENT, PAD, Tokenizer
from ptf.data.trie import Trie
from ptf.errors import UserError

TOKEN = re.compile(EVENT)


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    text: str  # its tokens, one after the other
    value: float = 1.0  # what one of it brings in
    popularity: float = 0.0  # share of the users who had it, in what may be trained on
    description: str = ""


@dataclass(frozen=True)
class Catalogue:
    items: tuple[Item, ...]
    tokenizer: str  # fingerprint

    @cached_property
    def by_name(self) -> Mapping[str, Item]:
        return {item.name: item for item in self.items}

    @cached_property
    def by_text(self) -> Mapping[str, Item]:
        return {item.text: item for item in self.items}

    def read(self, text: str) -> list[Item | None]:
        """The items that a text names, in its order; None for tokens that name none."""
        found: list[Item | None] = []
        held = ""
        for token in TOKEN.findall(text):
            if token in (END, PAD):
                continue
            if held and held + token not in self.by_text and held + token not in self._beginnings:
                found.append(None)  # what was begun ends in nothing; this token may begin the next
                held = ""
            held += token
            if item := self.by_text.get(held):
                found.append(item)
                held = ""
            elif held not in self._beginnings:
                found.append(None)
                held = ""
        return [*found, None] if held else found

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """What an item's text begins with."""
        tokens = [TOKEN.findall(item.text) for item in self.items]
        return frozenset("".join(of[:n]) for of in tokens for n in range(1, len(of)))

    def trie(self, tokenizer: Tokenizer, repeat: int = 1, distinct: bool = False) -> Trie:
        """Of all items; see Trie.of. Raises UserError for another tokenizer than the catalogue's."""
        self.refuse_other(tokenizer, "the tokenizer")
        return Trie.of(tokenizer.encode_all([item.text for item in self.items]), tokenizer.stop_ids, repeat, distinct)

    def refuse_other(self, tokenizer: Tokenizer, what: str) -> None:
        if tokenizer.fingerprint() != self.tokenizer:
            raise UserError(
                f"the catalogue was made with another tokenizer than {what} ({self.tokenizer[:12]}, not {tokenizer.fingerprint()[:12]}): its items would be "
                "other tokens; prepare both together, or take the tokenizer that lies beside the catalogue"
            )

    def save(self, path: str) -> None:
        storage.write_text(path, json.dumps({"tokenizer": self.tokenizer, "items": [asdict(item) for item in self.items]}))

    @staticmethod
    def load(path: str) -> "Catalogue":
        try:
            found = json.loads(storage.read_text(path))
            return Catalogue(tuple(Item(**item) for item in found["items"]), found["tokenizer"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a catalogue (ptf.data.catalogue)") from None


def items_vectors(catalogue: str) -> np.ndarray:
    """[items, d] of unit length, which lie beside the catalogue (a path or URI)."""
    place = f"{catalogue.rsplit('/', 1)[0]}/vectors.npy" if "/" in catalogue else "vectors.npy"
    with storage.open_read(place) as file:
        return np.load(io.BytesIO(file.read()))
