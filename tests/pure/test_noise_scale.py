"""The noise scale's arithmetic: no bias, and intervals that hold what they say."""

import doctest
import math

import numpy as np
import pytest

from tfdp.plan import noise_scale
from tfdp.plan.noise_scale import NoiseAverage, split_norms, student_quantile


def split_steps(rng, mean, sigma, parts, steps):
    """|G|^2 and tr(C) of each of `steps` steps whose parts have these many rows."""
    rows, sizes = sum(parts), np.array(parts)
    noise = rng.normal(size=(steps, len(parts), mean.size)) * sigma
    means = mean + noise / np.sqrt(sizes)[:, None]
    small = np.sum(means**2, axis=2) @ sizes / rows
    big = np.sum((sizes @ means / rows) ** 2, axis=1)
    return [
        split_norms(s, b, len(parts), rows) for s, b in zip(small, big, strict=True)
    ]


def averaged(rng, mean, sigma, parts, steps, decay=1.0):
    average = NoiseAverage(decay)
    for norms in split_steps(rng, mean, sigma, parts, steps):
        average.add(*norms)
    return average.estimate()


def test_examples():
    assert doctest.testmod(noise_scale).failed == 0


@pytest.mark.parametrize("parts", [(8, 8), (8, 8, 8, 8), (7, 5, 1)])
def test_each_step_is_without_bias_for_unequal_parts_too(parts):
    rng, mean, sigma = np.random.default_rng(1), np.full(5, 0.6), 3.0
    found = np.array(split_steps(rng, mean, sigma, parts, 20_000))
    expected = np.array([np.sum(mean**2), mean.size * sigma**2])
    errors = found.std(axis=0) / np.sqrt(len(found))
    # Four standard errors: 1 in 16,000 by chance. With rows / parts taken for the size
    # of every part by a mistake in the weights, (7, 5, 1) is off by over 20.
    assert np.all(np.abs(found.mean(axis=0) - expected) < 4 * errors)


@pytest.mark.parametrize("decay", [1.0, 0.98])
@pytest.mark.parametrize("sigma", [0.5, 6.0])
def test_intervals_hold_the_truth_in_95_of_100(sigma, decay):
    """400 draws: a binomial of 0.95 is within 0.95 +- 4 x 0.011 but for 1 in 16,000;
    2 points more for the skew of chi-squares that Student's quantile does not know."""
    rng, mean = np.random.default_rng(2), np.full(6, 0.5)
    truth = mean.size * sigma**2 / np.sum(mean**2)
    found = [averaged(rng, mean, sigma, (8, 8, 8, 8), 100, decay) for _ in range(400)]
    share = np.mean([e.low <= truth <= e.high for e in found])
    assert 0.89 <= share <= 0.995
    assert all(e.low <= e.noise_scale <= e.high for e in found)
    expected_steps = 100 if decay == 1.0 else (1 + decay) / (1 - decay)
    assert found[0].steps == pytest.approx(expected_steps, rel=0.3)


def test_where_no_gradient_stands_out_there_is_no_upper_end():
    rng = np.random.default_rng(3)
    ends = [averaged(rng, np.zeros(6), 1.0, (8, 8), 50) for _ in range(200)]
    # |G|^2 = 0 is in the 95% interval.
    assert np.mean([math.isinf(e.high) for e in ends]) > 0.9
    # The noise does stand out: small noise scales are ruled out.
    assert np.median([e.low for e in ends]) > 8


def test_what_varies_together_leaves_the_ratio_sharp():
    """tr(C) = 2 |G|^2 in every step: no spread of either makes the ratio less sure."""
    average, rng = NoiseAverage(0.99), np.random.default_rng(4)
    for norm in 5 + rng.normal(size=100):
        average.add(norm, 2 * norm)
    estimate = average.estimate()
    # What is left is the root of the rounding of numbers near 1.
    assert estimate.low == pytest.approx(2.0, abs=1e-6)
    assert estimate.high == pytest.approx(2.0, abs=1e-6)


def test_old_steps_fade():
    average = NoiseAverage(0.9)
    for trace in (100.0,) * 200 + (1.0,) * 200:
        average.add(1.0, trace)
    estimate = average.estimate()
    assert estimate.noise_scale == pytest.approx(1.0, abs=1e-6)
    assert estimate.steps == pytest.approx(19.0, rel=1e-6)


def test_few_steps_tell_nothing():
    average = NoiseAverage(1.0)
    assert average.estimate() is None
    for _ in range(2):
        average.add(1.0, 2.0)
    assert average.estimate() is None
    average.add(1.0, 2.0)
    assert average.estimate().noise_scale == 2.0


@pytest.mark.parametrize(
    "degrees, quantile", [(2, 4.303), (5, 2.571), (30, 2.042), (1000, 1.962)]
)
def test_quantiles_are_those_of_the_tables(degrees, quantile):
    tolerance = 0.03 if degrees < 3 else 0.005
    assert student_quantile(degrees) == pytest.approx(quantile, rel=tolerance)
