"""The catalogue of items: the tokens, the value and the description of each.

A catalogue belongs to one tokenizer, whose fingerprint it stores. It is refused with any other tokenizer, because its
items would be different tokens.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ptf import storage
from ptf.data.event_tokens import END, EVENT, PAD
from ptf.data.trie import Trie
from ptf.errors import UserError

if TYPE_CHECKING:
    from ptf.data.tokenizer import Tokenizer

TOKEN = re.compile(EVENT)


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a catalogue."""

    name: str
    text: str  # the item's tokens, joined
    value: float = 1.0  # revenue of one unit
    popularity: float = 0.0  # share of users who had the item, in the part of the data for training
    description: str = ""


@dataclass(frozen=True)
class Catalogue:
    """All items, in order."""

    items: tuple[Item, ...]
    tokenizer: str  # the tokenizer's fingerprint

    @cached_property
    def by_name(self) -> Mapping[str, Item]:
        """Return the items by their names."""
        return {item.name: item for item in self.items}

    @cached_property
    def by_text(self) -> Mapping[str, Item]:
        """Return the items by their token texts."""
        return {item.text: item for item in self.items}

    def read(self, text: str) -> list[Item | None]:
        """Return the items whose tokens are in a text, in order; None for tokens that are not an item."""
        items, prefix = list[Item | None](), ""
        for token in TOKEN.findall(text):
            if token in (END, PAD):
                continue
            if prefix and prefix + token not in self.by_text and prefix + token not in self._beginnings:
                items.append(None)  # the prefix is not an item; this token may begin the next one
                prefix = ""
            prefix += token
            if prefix in self.by_text or prefix not in self._beginnings:
                items.append(self.by_text.get(prefix))
                prefix = ""
        return [*items, None] if prefix else items

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """Return every proper prefix of an item's text, in whole tokens."""
        tokens = [TOKEN.findall(item.text) for item in self.items]
        return frozenset("".join(item[:n]) for item in tokens for n in range(1, len(item)))

    def trie(self, tokenizer: "Tokenizer", repeat: int = 1, distinct: bool = False) -> Trie:
        """Return the trie of all items (see Trie.of). Raises UserError if the tokenizer is not the catalogue's."""
        self.raise_if_different(tokenizer, "the tokenizer")
        return Trie.of(tokenizer.encode_all([item.text for item in self.items]), tokenizer.stop_ids, repeat, distinct)

    def raise_if_different(self, tokenizer: "Tokenizer", what: str) -> None:
        """Raise UserError unless the catalogue was made with this tokenizer; `what` names it in the message."""
        if tokenizer.identity["fingerprint"] != self.tokenizer:
            raise UserError(
                f"the catalogue was made with a different tokenizer than {what} ({self.tokenizer[:12]}, "
                f"not {tokenizer.identity['fingerprint'][:12]}), so its items would be "
                "different tokens; prepare both together, or use the tokenizer that is stored beside the catalogue"
            )

    def save(self, path: str) -> None:
        """Write the catalogue as JSON."""
        storage.write_text(
            path, json.dumps({"tokenizer": self.tokenizer, "items": [asdict(item) for item in self.items]})
        )

    @staticmethod
    def load(path: str) -> "Catalogue":
        """Read a catalogue that `save` wrote. Raises UserError if the file is not a catalogue."""
        try:
            stored = json.loads(storage.read_text(path))
            return Catalogue(tuple(Item(**item) for item in stored["items"]), stored["tokenizer"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a catalogue; ptf.events.prepare writes one") from None


def beside(catalogue: str, name: str) -> str:
    """Return the path or URI of a file in the catalogue's directory."""
    return f"{catalogue.rsplit('/', 1)[0]}/{name}" if "/" in catalogue else name


def load_item_vectors(catalogue: str) -> np.ndarray:
    """Return the vectors of unit length, [items, d], that are stored beside the catalogue (a path or URI)."""
    with storage.open_read(beside(catalogue, "vectors.npy")) as file:
        return np.load(file)
