"""Variables of ranks, as they are made while a step is traced."""

import tensorflow as tf

from tfdp.variables.own_values import OfRanks


class _Kept(OfRanks):
    """Its name, with underscores in front, is none of a scope."""


def test_may_be_made_in_a_graph():
    made = []

    @tf.function
    def trace():
        made.append(_Kept([2], ["CPU:0", "CPU:1"]))
        return tf.constant(0)

    trace()
    assert made[0].rows().shape == (2, 2)
