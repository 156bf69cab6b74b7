"""A survey of the data before training: what rows become, how long they are, how well they pack, and how large an epoch
is.

The first rows of each source go through the encoder and packer that training uses; numbers for the other rows are
extrapolated, and marked as such.
"""

import heapq
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ptf.data.encode import Encode, TooLong
from ptf.data.mixture import Mixture
from ptf.data.packing import pack_all
from ptf.data.prefixes import separate
from ptf.data.quarantine import BadRow
from ptf.data.sample import PackUnit, length
from ptf.data.source_units import encoder_of, opened
from ptf.data.sources.rows import SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer
from ptf.data.unread import Unread

LONGEST = 3
WORST = 5  # bad rows that are shown
REASONS = 20  # reasons for leaving rows out that are listed; all others are counted together
SEQUENCES_SHOWN = 24
NONE_MADE = "no sample was made of it", "no sample was made of it when it was tokenized"


@dataclass(frozen=True, slots=True)
class SourceSurvey:
    """The survey of one source."""

    name: str
    kind: str
    counts: Mapping[str, int]  # counts of the encoder over the rows that were read
    rows: float  # in the source; extrapolated where not all were read
    whole: bool  # all rows were read
    lengths: np.ndarray  # [units] tokens
    longest: tuple[tuple[int, str], ...]  # tokens and place, the longest first
    bad: tuple[BadRow, ...]  # the first ones
    left_out: Mapping[str, int]  # reason → how many of the rows that were read are not trained because of it
    unused_rows_share: float  # share of the rows that were read that gave no sample
    examples: tuple[tuple[str, PackUnit], ...]  # place and pack unit, the first ones
    unread: tuple[str, ...] = ()  # columns that are not used
    not_read: tuple[str, ...] = ()  # names of files in the directory that are not data

    @property
    def samples(self) -> float:
        """Samples in an epoch."""
        return self.counts["samples"] * self.rows / max(1, self.counts["rows"])

    @property
    def tokens(self) -> float:
        """Tokens in an epoch."""
        return self.counts["tokens"] * self.rows / max(1, self.counts["rows"])

    @property
    def expansion(self) -> float:
        """Tokens relative to those of each conversation's longest sample: the cost of splitting conversations."""
        return self.counts["tokens"] / max(1, self.counts["whole"])


@dataclass(frozen=True, slots=True)
class Survey:
    """The survey of all sources and of their mixture."""

    sources: tuple[SourceSurvey, ...]
    fill: float  # share of packed sequences that holds tokens, without the last few sequences
    documents: float  # per packed sequence
    shares: Mapping[str, tuple[float, float]]  # of each source in the mixture: share of samples, share of tokens
    tokens: float  # in an epoch of all sources
    steps: float  # in an epoch of all sources
    # documents of the first packed sequences: source and tokens of each
    packing: tuple[tuple[tuple[str, int], ...], ...]


def survey(
    sources: Mapping[str, SourceSpec],
    tokenizer: Tokenizer,
    encode: Encode,
    *,
    seq_len: int,
    too_long: TooLong,
    lookahead: int,
    sequences: int,
    temperature: float = 1.0,
    by_tokens: bool = False,
    limit: int = 2000,
    examples: int = 1,
    share_prefixes: bool = False,
    read_keys: Sequence[str] = (),
) -> Survey:
    """Read the first `limit` rows of each source and pack them; a step has `sequences` packed sequences."""
    surveyed, units = [], {}
    for name, spec in sources.items():
        one, units[name] = survey_source(
            name, spec, tokenizer, encode, seq_len, too_long, limit, examples, share_prefixes, read_keys
        )
        surveyed.append(one)
    packed = pack_all(_mixed(units), seq_len, lookahead)
    # at the end the window runs empty, which does not happen in an endless stream
    full = packed[: max(1, len(packed) - lookahead // 4)]
    used = sum(length(unit) for sequence in full for unit in sequence)
    fill = used / (seq_len * len(full)) if packed else 0.0
    tokens = sum(source.tokens for source in surveyed)
    mixture = Mixture(sources, 0, temperature, "tokens" if by_tokens else "samples")
    weights = mixture.shares(
        {source.name: sources[source.name].rows or max(1, round(source.rows)) for source in surveyed}
    )
    mean = {source.name: source.tokens / max(1.0, source.samples) for source in surveyed}
    samples = {name: weight / (mean[name] or 1.0) if by_tokens else weight for name, weight in weights.items()}
    if not mixture.weighted:  # the shares are of rows
        samples = {source.name: weights[source.name] * source.samples / max(1.0, source.rows) for source in surveyed}
    counted = {name: n * mean[name] for name, n in samples.items()}
    shares = {
        name: (samples[name] / (sum(samples.values()) or 1.0), counted[name] / (sum(counted.values()) or 1.0))
        for name in sources
    }
    documents = sum(len(unit) for sequence in full for unit in sequence) / max(1, len(full))
    shown = tuple(
        tuple((sample.source, len(sample)) for unit in sequence for sample in unit)
        for sequence in packed[:SEQUENCES_SHOWN]
    )
    return Survey(
        tuple(surveyed), fill, documents, shares, tokens, tokens / max(1.0, fill * seq_len * sequences), shown
    )


def survey_source(
    name: str,
    spec: SourceSpec,
    tokenizer: Tokenizer,
    encode: Encode,
    seq_len: int,
    too_long: TooLong,
    limit: int,
    examples: int = 0,
    share_prefixes: bool = False,
    read_keys: Sequence[str] = (),
) -> tuple[SourceSurvey, list[PackUnit]]:
    """Return the survey of one source and its units."""
    bad: list[BadRow] = []
    reader, spec = opened(spec, tokenizer)
    unread = Unread(spec, tokenizer, read_keys)
    encoder = encoder_of(
        name, spec, encode, seq_len, too_long, lambda row, counts: bad.append(row), share_prefixes, unread
    )
    units: list[PackUnit] = []
    shown: list[tuple[str, PackUnit]] = []
    longest: list[tuple[int, str]] = []
    read = empty = none_made = 0
    places = rows_once(reader, spec.limit)
    for place in islice(places, limit):
        before = encoder.counts["too_long"], len(bad)
        row_units = encoder(place)
        read += 1
        empty += not row_units
        none_made += not row_units and (encoder.counts["too_long"], len(bad)) == before
        units += row_units
        whole_ones = [(sample,) for unit in row_units for sample in separate(unit)] if share_prefixes else row_units
        shown += [(place.where, unit) for unit in whole_ones][: max(0, examples - len(shown))]
        if row_units:
            heapq.heappush(longest, (max(map(length, row_units)), place.where))
            longest = heapq.nlargest(LONGEST, longest)
            heapq.heapify(longest)
    whole = next(places, None) is None
    rows = float(read) if whole else max(reader.rows, float(read))
    lengths = np.array([length(unit) for unit in units], np.int64)
    return SourceSurvey(
        name,
        spec.kind,
        encoder.counts,
        min(rows, spec.limit or rows),
        whole,
        lengths,
        tuple(sorted(longest, reverse=True)),
        tuple(bad[:WORST]),
        left_out(bad, encoder.counts["too_long"], seq_len)
        | ({NONE_MADE[spec.kind == "tokenized"]: none_made} if none_made else {}),
        empty / max(1, read),
        tuple(shown),
        tuple(unread.names),
        reader.not_read,
    ), units


def left_out(bad: Sequence[BadRow], too_long: int, seq_len: int) -> dict[str, int]:
    """Return how many rows or samples are not trained, by reason.

    Bad rows are counted by their message, in which every number is replaced by N, so that those of one kind are counted
    together; only the `REASONS` commonest are listed.
    """
    reasons = Counter(re.sub(r"\d+", "N", row.reason) for row in bad)
    common = dict(reasons.most_common(REASONS))
    others = {"other reasons": reasons.total() - sum(common.values())}
    long = {f"does not fit data.seq_len ({seq_len}), or nothing in it is trained": too_long}
    return {reason: n for reason, n in (long | common | others).items() if n}


def _mixed(units: Mapping[str, Sequence[PackUnit]]) -> list[PackUnit]:
    """Return the units of all sources in a random order."""
    flat = [unit for each in units.values() for unit in each]
    order = np.random.default_rng(0).permutation(len(flat))
    return [flat[i] for i in order]
