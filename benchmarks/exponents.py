"""The power of its size with which a cost grows, from measured costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

BOUND = 1.15  # of an exponent and two standard errors
SPAN = 30  # the largest size by the smallest, at least
SIZES = 5  # at least


@dataclass(frozen=True)
class Fit:
    """The power of the size with which a cost grows."""

    exponent: float
    standard_error: float
    local: float  # the exponent between the two largest sizes

    @property
    def at_most(self) -> float:
        """Return the exponent and two standard errors."""
        return self.exponent + 2 * self.standard_error

    def within(self, bound: float | None) -> bool:
        """Return whether the exponent is below the bound with two standard errors; without a bound it is."""
        return bound is None or self.at_most <= bound


def fit(sizes: Sequence[float], costs: Sequence[float]) -> Fit:
    """Return the slope of log cost on log size, by least squares. Raises ValueError for sizes that are too few or too
    near each other."""
    if len(sizes) < SIZES or sorted(set(sizes)) != list(sizes) or sizes[-1] < SPAN * sizes[0]:
        raise ValueError(f"an exponent needs {SIZES} ascending sizes or more that span {SPAN} times, not {list(sizes)}")
    x, y = ([math.log(one) for one in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residual = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Fit(slope, math.sqrt(residual / (len(x) - 2) / spread), (y[-1] - y[-2]) / (x[-1] - x[-2]))
