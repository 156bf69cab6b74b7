"""Baskets: events that came together, in an order that means nothing.

The one idea: which order they are read in is drawn anew every time, after encoding and from where the row is and the epoch, so data that were tokenized
once teach no order either, and a resumed run draws the same ones.
"""

from dataclasses import replace

import numpy as np

from ptf.data.sample import Atom, Sample
from ptf.data.stream import randint

STREAM = "baskets"  # [n, 2] int32: which basket a token is in, from 1, and which of its events it belongs to; (0, 0) in none (encode_events)


def redrawn(atom: Atom, key: str) -> Atom:
    """The atom with the events of every basket in an order that `key` names; without baskets as it is."""
    if not any(STREAM in sample.streams for sample in atom):
        return atom
    rng = np.random.default_rng(randint(key, 0, 1 << 62))
    return tuple(reordered(sample, rng) for sample in atom)


def reordered(sample: Sample, rng: np.random.Generator) -> Sample:
    """The sample with the events of each basket permuted. What a place counts stays with the place: the first event of a basket, whichever it is,
    counts what the first one did."""
    where = sample.streams.get(STREAM)
    if where is None or len(sample) == 0:
        return sample
    begins = np.flatnonzero(np.r_[True, (where[1:] != where[:-1]).any(1)])  # of every event
    ends = np.r_[begins[1:], len(sample)]
    basket = where[begins, 0]
    runs = np.cumsum(np.r_[True, (basket[1:] != basket[:-1]) | (basket[1:] == 0)])  # a basket, or one event that is in none
    order = np.lexsort((rng.random(len(begins)), runs))
    sizes = (ends - begins)[order]
    take = np.repeat(begins[order], sizes) + np.arange(len(sample)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    weights = np.repeat(np.maximum.reduceat(sample.weights, begins), sizes)
    weights[0] = 0.0
    streams = {name: values[take] for name, values in sample.streams.items()}
    streams[STREAM] = np.stack([where[take, 0], np.repeat(where[begins, 1], sizes)], 1)
    return replace(sample, tokens=sample.tokens[take], weights=weights, streams=streams)
