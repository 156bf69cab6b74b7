"""Baskets: events that happened together, whose order means nothing.

The order in which a basket is read is a function of the row's place and the epoch, applied after encoding. It changes
in each epoch, also for data that were tokenized once, and a resumed run repeats it.
"""

from dataclasses import replace

import numpy as np

from ptf.data.document import Document, PackUnit
from ptf.data.stream import randint

# [n, 2] int32: the number of a token's basket, from 1, and of its event in the basket; (0, 0) outside of baskets
# (encode_events)
BASKETS = "baskets"


def reorder_baskets(unit: PackUnit, *key: object) -> PackUnit:
    """Return the pack unit with the events of every basket in an order that the words of `key` name; unchanged without
    baskets."""
    if not any(BASKETS in sample.token_columns for sample in unit):
        return unit
    rng = np.random.default_rng(randint("/".join(map(str, key)), 0, 1 << 62))
    return tuple(permute_events(sample, rng) for sample in unit)


def permute_events(sample: Document, rng: np.random.Generator) -> Document:
    """Return the sample with the events of each basket permuted.

    Loss weights stay with the position: the first event of a basket, whichever it is, has the weight that the first one
    had.
    """
    where = sample.token_columns.get(BASKETS)
    if where is None or len(sample) == 0:
        return sample
    begins = np.flatnonzero(np.r_[True, (where[1:] != where[:-1]).any(1)])  # the first token of every event
    ends = np.r_[begins[1:], len(sample)]
    basket = where[begins, 0]
    # the number of the basket, or of the single event outside of baskets
    runs = np.cumsum(np.r_[True, (basket[1:] != basket[:-1]) | (basket[1:] == 0)])
    order = np.lexsort((rng.random(len(begins)), runs))
    sizes = (ends - begins)[order]
    take = np.repeat(begins[order], sizes) + np.arange(len(sample)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    weights = np.repeat(np.maximum.reduceat(sample.loss_weights, begins), sizes)
    weights[0] = 0.0
    permuted = sample.take(take)
    baskets = np.stack([where[take, 0], np.repeat(where[begins, 1], sizes)], 1)
    return replace(permuted, loss_weights=weights, token_columns={**permuted.token_columns, BASKETS: baskets})
