"""Measures of ranked lists beside values that are worked out by hand."""

import math

import numpy as np
import pytest

from ptf.events.ranking_metrics import coverage, diversity, interval, measures, with_value


def test_measures_are_what_they_are_by_hand() -> None:
    found = measures([5, 1, 7, 2], {1: 3.0, 2: 1.0, 9: 4.0}, 4)
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert found == pytest.approx(
        {
            "hr@4": 1.0,
            "recall@4": 2 / 3,
            "ndcg@4": (1 / math.log2(3) + 1 / math.log2(5)) / ideal,
            "mrr@4": 1 / 2,
            "revenue_recall@4": 4 / 8,
        }
    )
    assert set(measures([5], {1: 0.0}, 4).values()) == {0.0}
    assert measures([1, 5], {1: 1.0, 2: 1.0, 3: 1.0}, 2)["ndcg@2"] == pytest.approx(1 / (1 + 1 / math.log2(3))), (
        "of more than k, k could be there"
    )


def test_diversity_and_coverage() -> None:
    x = np.eye(3)
    assert diversity(x) == pytest.approx(1.0)
    assert diversity(np.stack([x[0], x[0]])) == pytest.approx(0.0)
    assert diversity(np.stack([x[0], x[0], x[1]])) == pytest.approx(2 / 3)
    assert diversity(x[:1]) == 0.0
    assert coverage([[0, 1], [1, 2]], 6) == 0.5


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(0), 0
    for trial in range(100):
        mean, low, high = interval(rng.normal(0.3, 1, 200), draws=500, seed=trial)
        assert low < mean < high
        inside += low < 0.3 < high
    assert inside >= 88
    assert interval(np.full(50, 0.2), draws=500) == pytest.approx((0.2, 0.2, 0.2))


def test_a_value_is_weighed_by_its_logarithm() -> None:
    scores, values = np.array([[-1.0, -2.0, -3.0], [-4.0, -np.inf, -0.5]]), np.array([1.0, math.e, 0.0])
    assert with_value(scores, values, 0.0) is scores
    np.testing.assert_allclose(
        with_value(scores, values, 0.5), [[-1.0, -1.5, -np.inf], [-4.0, -np.inf, -np.inf]], atol=1e-12
    )
