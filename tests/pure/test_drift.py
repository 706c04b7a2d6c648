"""Who drifted, told from hashes."""

import doctest

from tfdp.plan import drift
from tfdp.plan.drift import Drift, Holding, find_drifts


def held(hashes, variable="kernel", kept_with=None):
    with_whom = kept_with or [0] * len(hashes)
    return [
        Holding(variable, with_whom[rank], rank, value)
        for rank, value in enumerate(hashes)
    ]


def test_nobody_drifted():
    assert find_drifts(held([5, 5, 5])) == []
    assert find_drifts(held([5])) == []
    assert find_drifts([]) == []


def test_the_minority_drifted():
    found = find_drifts(held([5, 6, 5, 7, 5]))
    assert found == [Drift("kernel", (1, 3), 5, True)]


def test_without_a_majority_all_are_named():
    for hashes in ([5, 6], [5, 5, 6, 6], [5, 5, 6, 7]):
        ranks = tuple(range(len(hashes)))
        assert find_drifts(held(hashes)) == [Drift("kernel", ranks, len(hashes), False)]


def test_those_that_keep_alike_are_compared_and_no_others():
    assert find_drifts(held([5, 5, 6, 6], kept_with=[0, 0, 2, 2])) == []
    found = find_drifts(held([5, 8, 6, 6], kept_with=[0, 0, 2, 2]))
    assert found == [Drift("kernel", (0, 1), 2, False)]


def test_each_variable_is_by_itself():
    found = find_drifts([*held([5, 5, 6]), *held([1, 2, 2], "bias")])
    assert [(d.variable, d.ranks) for d in found] == [("kernel", (2,)), ("bias", (0,))]


def test_examples():
    assert doctest.testmod(drift).failed == 0
