"""What the other tests compare with: nothing that is not a number passes for equal."""

import types

import keras
import numpy as np
import pytest

from tests.support.conformance_reference import worst_ratio
from tests.support.parity import largest_difference, largest_distance
from tfdp.tools.testing import rounding

ARRAYS = [np.zeros(2), np.ones((2, 2)), np.zeros(0), np.full(3, 2.0)]


def spoilt(place, value):
    arrays = [array.copy() for array in ARRAYS]
    arrays[place].flat[-1] = value
    return arrays


def model_of(arrays):
    weights = [keras.Variable(array) for array in arrays if array.size]
    return types.SimpleNamespace(weights=weights)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_what_is_not_finite_is_never_within_a_bound(place, value):
    bounds = [np.ones_like(array) for array in ARRAYS]
    bad = spoilt(place, value)
    assert worst_ratio(ARRAYS, ARRAYS, bounds) == 0.0
    assert largest_distance(ARRAYS, ARRAYS) == 0.0
    # Each is how a test asks: the comparison must come out false.
    assert not worst_ratio(bad, ARRAYS, bounds) <= 1.0
    assert not worst_ratio(ARRAYS, bad, bounds) <= 1.0
    assert not largest_distance(bad, ARRAYS) < 1e-5
    assert not largest_difference(model_of(ARRAYS), model_of(bad)) < 1e-5
    if np.isnan(value):
        assert not worst_ratio(ARRAYS, ARRAYS, spoilt(place, value)) <= 1.0


@pytest.mark.parametrize("difference, bound", [(np.nan, 1.0), (1.0, np.nan)])
def test_a_check_of_users_does_not_hold_without_numbers(difference, bound):
    found = rounding.largest(np.array([0.0, difference, 0.0]))
    assert rounding.excess(found, bound) > 1
