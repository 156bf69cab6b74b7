"""The exponents of benchmarks/growth.py: those of known costs are found; a cost that grows too fast is refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.exponents import BOUND, fit

SIZES = [100 * 2**i for i in range(6)]


def noisy(cost: Callable[[float], float], noise: float) -> list[float]:
    rng = np.random.default_rng(0)
    return [cost(n) * math.exp(noise * rng.standard_normal()) for n in SIZES]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_a_known_exponent_is_found(exponent: float) -> None:
    exact = fit(SIZES, [3e-6 * n**exponent for n in SIZES])
    assert (exact.exponent, exact.local) == pytest.approx((exponent, exponent), abs=1e-9)
    assert exact.standard_error < 1e-9
    found = fit(SIZES, noisy(lambda n: 3e-6 * n**exponent, 0.05))
    assert 0 < abs(found.exponent - exponent) < 3 * found.standard_error < 0.15


def test_the_standard_error_is_that_of_the_text_books() -> None:
    costs = noisy(lambda n: n, 0.1)
    slope, covariance = np.polyfit(np.log(SIZES), np.log(costs), 1, cov=True)
    found = fit(SIZES, costs)
    assert found.exponent == pytest.approx(slope[0])
    assert found.standard_error == pytest.approx(covariance[0, 0] ** 0.5)


@pytest.mark.parametrize(
    ("cost", "holds"),
    [
        (lambda n: n, True),
        (lambda n: 5000 + n, True),
        (lambda n: n * math.log(n), False),  # of so small sizes, 100 to 3,200
        (lambda n: 1e4 * n + n * math.log(n), True),
        (lambda n: n**2, False),
        (lambda n: 1000 * n + n**2, False),
        (lambda n: n**1.2, False),
    ],
)
def test_a_cost_that_grows_too_fast_is_refused(cost: Callable[[float], float], holds: bool) -> None:
    for costs in ([cost(n) for n in SIZES], noisy(cost, 0.01)):
        assert fit(SIZES, costs).within(BOUND) == holds
        assert fit(SIZES, costs).within(None)


def test_what_is_too_uncertain_is_refused() -> None:
    found = fit(SIZES, noisy(lambda n: n, 0.9))
    assert found.exponent < BOUND < found.at_most
    assert not found.within(BOUND)


def test_a_constant_part_hides_an_exponent_but_between_the_largest_sizes() -> None:
    found = fit(SIZES, [3e6 + n**2 for n in SIZES])
    assert found.within(BOUND)
    assert found.local > BOUND + 0.05


@pytest.mark.parametrize("sizes", [SIZES[:4], SIZES[:5], [100, *SIZES], SIZES[::-1]])
def test_too_few_sizes_give_no_exponent(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="span 30 times"):
        fit(sizes, [float(n) for n in sizes])
