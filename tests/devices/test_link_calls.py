"""Calls over a link keep their order, within conditionals, too."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdp.exchange.link_calls import LinkCalls


@pytest.mark.parametrize("first", ["outside", "in a branch"])
def test_a_call_in_a_conditional_waits_for_the_one_before_it(first):
    """Nothing else orders the two: the numbers of one are not those of the other."""
    calls, made, is_second_there = LinkCalls(), [], threading.Event()

    def one(x):
        # Green: in vain, and then it goes on. Without an order the second comes.
        is_second_there.wait(0.5)
        made.append("first")
        return [x]

    def two(x):
        made.append("second")
        is_second_there.set()
        return [x]

    spec = [tf.TensorSpec([], tf.float32)]

    @tf.function
    def step(x, yes):
        if first == "outside":
            a = calls.call(one, [x], spec)[0]
        else:
            a = tf.cond(yes, lambda: calls.call(one, [x], spec)[0], lambda: x)
        b = tf.cond(yes, lambda: calls.call(two, [2 * x], spec)[0], lambda: x)
        c = calls.call(lambda y: [np.float32(y)], [3 * x], spec)[0]
        return a, b, c

    if first == "outside":
        results = step(tf.constant(1.0), tf.constant(True))
        assert [r.numpy() for r in results] == [1.0, 2.0, 3.0]
        assert made == ["first", "second"]
    else:
        results = step(tf.constant(1.0), tf.constant(False))
        assert [r.numpy() for r in results] == [1.0, 1.0, 3.0] and not made
