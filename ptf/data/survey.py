"""A look at the data before anything is trained: what rows become, how long they are, how well they pack, how much of an epoch they are.

The one idea: the first rows of each source go through the very encoder and packer that training uses; what is not seen is extrapolated, and said to be.
"""

import heapq
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ptf.data.encode import Encode, TooLong
from ptf.data.kinds import unread
from ptf.data.packing import pack_all
from ptf.data.pipeline import Mixture, encoder_of, opened
from ptf.data.prefixes import apart
from ptf.data.quarantine import BadRow
from ptf.data.sample import Atom, length
from ptf.data.sources import SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer

LONGEST = 3
WORST = 5  # bad rows that are shown
REASONS = 20  # for which rows are left out, told apart; all others are counted together
ROWS_SHOWN = 24
NONE_MADE = "no sample was made of it", "no sample was made of it when it was tokenized"


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What was found in one source."""

    name: str
    kind: str
    counts: Mapping[str, int]  # of the rows that were looked at
    rows: float  # in all; extrapolated where not all were looked at
    whole: bool  # all were
    lengths: np.ndarray  # [atoms]
    longest: tuple[tuple[int, str], ...]  # tokens and place, the longest first
    bad: tuple[BadRow, ...]  # the first ones
    left_out: Mapping[str, int]  # reason → of the rows that were looked at, how many are not trained for it
    dropped: float  # share of the rows that left no sample, of those that were looked at
    examples: tuple[tuple[str, Atom], ...]  # place and atom, the first ones
    unread: tuple[str, ...] = ()  # columns that nothing reads
    not_read: tuple[str, ...] = ()  # names of files beside those that are data

    @property
    def samples(self) -> float:
        """In an epoch."""
        return self.counts["samples"] * self.rows / max(1, self.counts["rows"])

    @property
    def tokens(self) -> float:
        """In an epoch."""
        return self.counts["tokens"] * self.rows / max(1, self.counts["rows"])

    @property
    def expansion(self) -> float:
        """Tokens over those of each conversation's longest sample: what splitting costs."""
        return self.counts["tokens"] / max(1, self.counts["whole"])


@dataclass(frozen=True, slots=True)
class Survey:
    sources: tuple[Surveyed, ...]
    fill: float  # of packed rows, the last few aside
    documents: float  # in a row
    shares: Mapping[str, tuple[float, float]]  # of the mixture: samples, tokens
    tokens: float  # in an epoch of all sources
    steps: float  # in it
    packing: tuple[tuple[tuple[str, int], ...], ...]  # of the first packed rows, the documents in order: source, tokens


def survey(
    sources: Mapping[str, SourceSpec], tokenizer: Tokenizer, encode: Encode, *, seq_len: int, too_long: TooLong, lookahead: int, rows: int,
    temperature: float = 1.0, by_tokens: bool = False, limit: int = 2000, examples: int = 1, share: bool = False,
) -> Survey:  # fmt: skip
    """Look at the first `limit` rows of each source; `rows` are packed in a step."""
    found, atoms = [], {}
    for name, spec in sources.items():
        one, atoms[name] = _look(name, spec, tokenizer, encode, seq_len, too_long, limit, examples, share)
        found.append(one)
    packed = pack_all(_mixed(atoms), seq_len, lookahead)
    full = packed[: max(1, len(packed) - lookahead // 4)]  # the window runs dry at the end, which an endless stream's does not
    used = sum(length(atom) for row in full for atom in row)
    fill = used / (seq_len * len(full)) if packed else 0.0
    tokens = sum(source.tokens for source in found)
    mixture = Mixture(sources, 0, temperature, "tokens" if by_tokens else "samples")
    weights = mixture.shares({source.name: sources[source.name].rows or max(1, round(source.rows)) for source in found})
    mean = {source.name: source.tokens / max(1.0, source.samples) for source in found}
    samples = {name: weight / (mean[name] or 1.0) if by_tokens else weight for name, weight in weights.items()}
    if not mixture.weighted:  # shares of rows
        samples = {source.name: weights[source.name] * source.samples / max(1.0, source.rows) for source in found}
    counted = {name: n * mean[name] for name, n in samples.items()}
    shares = {name: (samples[name] / (sum(samples.values()) or 1.0), counted[name] / (sum(counted.values()) or 1.0)) for name in sources}
    documents = sum(len(atom) for row in full for atom in row) / max(1, len(full))
    shown = tuple(tuple((sample.source, len(sample)) for atom in row for sample in atom) for row in packed[:ROWS_SHOWN])
    return Survey(tuple(found), fill, documents, shares, tokens, tokens / max(1.0, fill * seq_len * rows), shown)


def _look(
    name: str, spec: SourceSpec, tokenizer: Tokenizer, encode: Encode, seq_len: int, too_long: TooLong, limit: int, examples: int, share: bool
) -> tuple[Surveyed, list[Atom]]:
    bad: list[BadRow] = []
    reader, spec = opened(spec, tokenizer)
    encoder = encoder_of(name, spec, encode, seq_len, too_long, lambda row, counts: bad.append(row), share)
    atoms: list[Atom] = []
    shown: list[tuple[str, Atom]] = []
    longest: list[tuple[int, str]] = []
    seen = empty = none_made = 0
    places = rows_once(reader, spec.limit)
    for place in islice(places, limit):
        before = encoder.counts["dropped"], len(bad)
        made = encoder(place)
        seen += 1
        empty += not made
        none_made += not made and (encoder.counts["dropped"], len(bad)) == before
        atoms += made
        whole_ones = [(sample,) for atom in made for sample in apart(atom)] if share else made
        shown += [(place.where, atom) for atom in whole_ones][: max(0, examples - len(shown))]
        if made:
            heapq.heappush(longest, (max(map(length, made)), place.where))
            longest = heapq.nlargest(LONGEST, longest)
            heapq.heapify(longest)
    whole = next(places, None) is None
    rows = float(seen) if whole else max(reader.rows, float(seen))
    lengths = np.array([length(atom) for atom in atoms], np.int64)
    return Surveyed(
        name, spec.kind, encoder.counts, min(rows, spec.limit or rows), whole, lengths, tuple(sorted(longest, reverse=True)), tuple(bad[:WORST]),
        left_out(bad, encoder.counts["dropped"], seq_len) | ({NONE_MADE[spec.kind == "tokenized"]: none_made} if none_made else {}),
        empty / max(1, seen), tuple(shown), unread(spec, reader), reader.not_read,
    ), atoms  # fmt: skip


def left_out(bad: Sequence[BadRow], dropped: int, seq_len: int) -> dict[str, int]:
    """Reason → how many rows or samples are not trained for it. Bad rows go by their message, in which every number stands as N, so that those of
    one kind are counted together; the commonest `REASONS` are told apart."""
    found = Counter(re.sub(r"\d+", "N", row.reason) for row in bad)
    common = dict(found.most_common(REASONS))
    others = {"other reasons": found.total() - sum(common.values())}
    long = {f"does not fit data.seq_len ({seq_len}), or nothing in it is trained": dropped}
    return {reason: n for reason, n in (long | common | others).items() if n}


def _mixed(atoms: Mapping[str, Sequence[Atom]]) -> list[Atom]:
    """In an order that does not go by source."""
    flat = [atom for each in atoms.values() for atom in each]
    order = np.random.default_rng(0).permutation(len(flat))
    return [flat[i] for i in order]
