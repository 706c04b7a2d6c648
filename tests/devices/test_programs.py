"""Published kinds of programs, line for line but for the strategy: as on one device."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.support import programs
from tests.support.parity import make_strategy

# Six updates at rates of at most 0.05, gradients below 10, each two sums of about 60
# terms apart: 6 * 0.05 * 10 * 2 * 60 u = 2e-5. Adam divides by sqrt(v) + 1e-3 what it
# takes at a rate of 0.02, which is within that for slopes above 1e-3.
BOUND = 2e-5


@functools.cache
def on_one_device(name):
    return programs.run(name, tf.distribute.get_strategy())


# The others take the same ways through the package.
DEFAULT = {
    ("gan", 3),
    ("gan-with-a-dictionary", 3),
    ("custom-loop", 3),
    ("transfer-learning", 2),
}
ROWS = [
    pytest.param(
        name,
        replicas,
        marks=() if (name, replicas) in DEFAULT else pytest.mark.slow,
    )
    for name in programs.PROGRAMS
    for replicas in (2, 3)
]


@pytest.mark.parametrize("name, replicas", ROWS)
def test_equals_one_device(name, replicas):
    expected = on_one_device(name)
    got = programs.run(name, make_strategy(replicas))
    assert len(got) == len(expected)
    for place, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=BOUND, err_msg=f"{name} {place}"
        )
