"""Passes that compile before the first step: which shapes they have, and that they change nothing."""

import pytest

from ptf.train.warm_up import in_passes


@pytest.mark.parametrize(
    ("sequences", "most", "found"), [(8, 8, {8}), (8, 3, {3, 2}), (2, 8, {2}), (9, 4, {4, 1}), (1, 1, {1})]
)
def test_the_passes_of_a_step_have_these_numbers_of_sequences(sequences, most, found):
    batches = [min(most, sequences - first) for first in range(0, sequences, most)]
    assert in_passes(sequences, most) == set(batches) == found
