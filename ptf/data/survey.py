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

from ptf.data.document import PackUnit, length
from ptf.data.packing import pack_sample
from ptf.data.partitions import Partitions
from ptf.data.prefixes import separate
from ptf.data.quarantine import BadRow
from ptf.data.unread import Unread

LONGEST = 3
WORST = 5  # bad rows that are shown
REASONS = 20  # reasons for leaving rows out that are listed; all others are counted together
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


def survey(partitions: Partitions, *, sequences: int, limit: int = 2000, examples: int = 1) -> Survey:
    """Read the first `limit` rows of each source and pack them; a step has `sequences` packed sequences."""
    sources, mixture = partitions.sources, partitions.mixture
    surveyed, units = [], list[PackUnit]()
    for name in sources:
        one, of_source = survey_source(partitions, name, limit, examples)
        surveyed.append(one)
        units += of_source
    full = pack_sample(units, partitions.seq_len, partitions.lookahead)
    used = sum(length(unit) for sequence in full for unit in sequence)
    fill = used / (partitions.seq_len * len(full)) if full else 0.0
    tokens = sum(source.tokens for source in surveyed)
    weights = mixture.shares(
        {source.name: partitions.rows(source.name) or max(1, round(source.rows)) for source in surveyed}
    )
    mean = {source.name: source.tokens / max(1.0, source.samples) for source in surveyed}
    by_tokens = mixture.by == "tokens"
    samples = {name: weight / (mean[name] or 1.0) if by_tokens else weight for name, weight in weights.items()}
    if not mixture.weighted:  # the shares are of rows
        samples = {source.name: weights[source.name] * source.samples / max(1.0, source.rows) for source in surveyed}
    counted = {name: n * mean[name] for name, n in samples.items()}
    shares = {
        name: (samples[name] / (sum(samples.values()) or 1.0), counted[name] / (sum(counted.values()) or 1.0))
        for name in sources
    }
    documents = sum(len(unit) for sequence in full for unit in sequence) / max(1, len(full))
    return Survey(
        tuple(surveyed),
        fill,
        documents,
        shares,
        tokens,
        steps=tokens / max(1.0, fill * partitions.seq_len * sequences),
    )


def survey_source(
    partitions: Partitions, name: str, limit: int, examples: int = 0
) -> tuple[SourceSurvey, list[PackUnit]]:
    """Return the survey of the first `limit` rows of one source, and their units."""
    bad: list[BadRow] = []
    ordered, spec = partitions.opened(name)
    unread = Unread(spec, partitions.tokenizer, partitions.read_keys)
    encoder = partitions.encoder(name, lambda row, counts: bad.append(row), unread)
    units: list[PackUnit] = []
    shown: list[tuple[str, PackUnit]] = []
    longest: list[tuple[int, str]] = []
    read = empty = none_made = 0
    places = partitions.first_rows(name)
    for place in islice(places, limit):
        before = encoder.counts["too_long"], len(bad)
        row_units = encoder(place)
        read += 1
        empty += not row_units
        none_made += not row_units and (encoder.counts["too_long"], len(bad)) == before
        units += row_units
        if len(shown) < examples:
            parts = [(sample,) for unit in row_units for sample in separate(unit)]
            whole_ones = parts if partitions.share_prefixes else row_units
            shown += [(place.where, unit) for unit in whole_ones][: examples - len(shown)]
        if row_units:
            longest = heapq.nlargest(LONGEST, [*longest, (max(map(length, row_units)), place.where)])
    whole = next(places, None) is None
    rows = float(read) if whole else max(ordered.reader.rows, float(read))
    return SourceSurvey(
        name,
        spec.kind,
        encoder.counts,
        min(rows, spec.limit or rows),
        whole,
        np.array([length(unit) for unit in units], np.int64),
        tuple(longest),
        tuple(bad[:WORST]),
        left_out(bad, encoder.counts["too_long"], partitions.seq_len)
        | ({NONE_MADE[spec.kind == "tokenized"]: none_made} if none_made else {}),
        empty / max(1, read),
        tuple(shown),
        tuple(unread.names),
        ordered.reader.not_read,
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
