"""The gradient noise scale from squared norms of gradients, with its uncertainty. Pure.

With B independent rows in a batch, the batch's mean gradient g has

    E |g|^2 = |G|^2 + tr(C) / B

(G the gradient of the whole distribution, C the covariance of one row's gradient). Two
batch sizes determine both unknowns, McCandlish et al. 2018, appendix A.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

# 95% of a standard normal distribution are within.
NORMAL_QUANTILE = 1.959963984540054
# Fewer steps do not determine their own variance.
FEWEST_STEPS = 3.0


class NormsOfStep(NamedTuple):
    """The squared norms of one step: the arguments of `split_norms`."""

    small: float
    big: float
    parts: float
    rows: float


def split_norms(
    small: float, big: float, parts: float, rows: float
) -> tuple[float, float]:
    """|G|^2 and tr(C), both unbiased, from one step.

    With B_big = `rows` and B_small = rows / parts:

        |G|^2 = (B_big big - B_small small) / (B_big - B_small)
        tr(C) = (small - big) / (1 / B_small - 1 / B_big)

    Args:
      small: the mean of |g_r|^2 over the rows of the batch, g_r the mean gradient of
        the part that contains row r. Parts of n_r rows may differ in size: each weighs
        n_r / rows and has the noise tr(C) / n_r, together parts / rows.
      big: |g|^2 of the mean gradient of all rows.
      parts: the number of parts with rows, at least 2.

    >>> split_norms(small=5.0, big=2.0, parts=4, rows=32)
    (1.0, 32.0)
    """
    return (parts * big - small) / (parts - 1), rows * (small - big) / (parts - 1)


def ada_scale_gain(
    squared_norm: float, trace: float, small_rows: float, scale: float
) -> float:
    """How many steps of `small_rows` equal one step of `scale` times as many rows.

    With the noise t = tr(C) / small_rows of the small step's gradient:

        r = (t + |G|^2) / (t / scale + |G|^2)

    Negative estimates count as 0. Source: Johnson et al. 2020, "AdaScale SGD", eq. 4.

    >>> ada_scale_gain(1.0, 30.0, small_rows=10, scale=3)
    2.0
    >>> ada_scale_gain(0.0, 30.0, 10, 3), ada_scale_gain(1.0, 0.0, 10, 3)
    (3.0, 1.0)
    """
    norm, noise = max(squared_norm, 0.0), max(trace, 0.0) / small_rows
    below = noise / scale + norm
    return (noise + norm) / below if below > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class NoiseEstimate:
    """An estimate of the noise scale tr(C) / |G|^2, in rows, with its 95% interval.

    Infinite when no gradient stands out from the noise. `steps` is the effective
    number, of equal weight; fewer where older ones decay.
    """

    noise_scale: float
    low: float
    high: float
    squared_norm: float
    trace: float
    steps: float


class NoiseAverage:
    """The noise scale from many steps: averages of tr(C) and |G|^2, then their ratio.

    The mean of each step's ratio would be biased, and need not exist. With the
    normalized weights w_t = decay^(T - t) (1: equal ones) and the averages y of tr(C)
    and x of |G|^2, the covariances are estimated by (for x and y)

        v_xy = n / (n - 1) sum_t w_t^2 (x_t - x) (y_t - y),    n = 1 / sum_t w_t^2

    and the interval is Fieller's (1954, J. R. Stat. Soc. B 16(2)): all p >= 0 for which
    y - p x is within t standard errors of 0, (y - p x)^2 <= t^2 (v_yy - 2 p v_xy + p^2
    v_xx), with the quantile t of Student's distribution of n - 1 degrees. Where x does
    not stand out from 0, which no delta method would detect, it has no upper end.
    """

    def __init__(self, decay: float):
        self._decay = decay
        # Sums of w, w x, w y; and of w^2 times 1, x, y, x^2, xy, y^2.
        self._first = [0.0] * 3
        self._second = [0.0] * 6

    @property
    def sums(self) -> list[float]:
        """The whole state, as plain numbers; can be set."""
        return [*self._first, *self._second]

    @sums.setter
    def sums(self, sums: Sequence[float]) -> None:
        self._first, self._second = list(sums[:3]), list(sums[3:9])

    def add(self, squared_norm: float, trace: float) -> None:
        """Adds the result of one step's `split_norms`."""
        x, y, decay = squared_norm, trace, self._decay
        first = (1.0, x, y)
        second = (1.0, x, y, x * x, x * y, y * y)
        self._first = [decay * a + b for a, b in zip(self._first, first, strict=True)]
        self._second = [
            decay**2 * a + b for a, b in zip(self._second, second, strict=True)
        ]

    def estimate(self) -> NoiseEstimate | None:
        """The noise scale; None while there are fewer than three steps."""
        weight, x, y = self._first
        if not weight or (steps := weight**2 / self._second[0]) < FEWEST_STEPS:
            return None
        x, y = x / weight, y / weight
        squares, of_x, of_y, xx, xy, yy = (
            value / weight**2 * steps / (steps - 1) for value in self._second
        )
        low, high = fieller_interval(
            y,
            x,
            yy - 2 * y * of_y + y * y * squares,
            xy - x * of_y - y * of_x + x * y * squares,
            xx - 2 * x * of_x + x * x * squares,
            student_quantile(steps - 1),
        )
        scale = max(y, 0.0) / x if x > 0 else math.inf
        return NoiseEstimate(scale, low, high, x, y, steps)


def fieller_interval(
    top: float,
    bottom: float,
    top_variance: float,
    covariance: float,
    bottom_variance: float,
    quantile: float,
) -> tuple[float, float]:
    """The range of top / bottom, from 0 up, within `quantile` standard errors.

    >>> fieller_interval(10.0, 5.0, 0.0, 0.0, 0.0, 2.0)
    (2.0, 2.0)
    >>> fieller_interval(10.0, 1.0, 0.0, 0.0, 1.0, 2.0)[1]
    inf
    """
    square = quantile**2
    a = bottom**2 - square * bottom_variance
    b = top * bottom - square * covariance
    c = top**2 - square * top_variance
    # The roots of a p^2 - 2 b p + c; rounding may make the discriminant negative.
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and bottom > 0:
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    # The bottom may be 0. Where the top cannot, small ratios are still ruled out.
    if c <= 0 or top <= 0:
        return 0.0, math.inf
    # c / (b + root) is (b - root) / a without dividing by a, which may be 0.
    return (c / (b + root) if b + root > 0 else 0.0), math.inf


def student_quantile(degrees: float) -> float:
    """Student's quantile for 95% within: to 1% from 3 degrees on.

    Source: Abramowitz and Stegun, 1964, 26.7.5.

    >>> round(student_quantile(10.0), 2), round(student_quantile(1e9), 2)
    (2.23, 1.96)
    """
    z = NORMAL_QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**n for n, term in enumerate(terms, start=1))
