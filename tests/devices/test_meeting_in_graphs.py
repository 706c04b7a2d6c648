"""Replicas that meet in graphs: calls of one function, and sums of unlike sizes."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy
from tests.support.replica_steps import distribute

CALLS = 4
TURNS = 150


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_calls_do_not_meet_each_other(engine, replicas):
    """Hand-overs of both calls have the same names; 126 of 3000 were mixed up."""
    strategy = make_strategy(replicas, engine=engine)

    def total(x):
        return tf.distribute.get_replica_context().all_reduce("sum", x)

    @tf.function
    def inner(x):
        return strategy.experimental_local_results(strategy.run(total, (x,)))

    @tf.function
    def outer(values):
        return [inner(value) for value in values]

    of_each = [10.0**rank for rank in range(replicas)]
    given = [
        distribute(strategy, [scale * own for own in of_each])
        for scale in range(1, CALLS + 1)
    ]
    of_one = sum(of_each)
    wanted = [[scale * of_one] * replicas for scale in range(1, CALLS + 1)]
    for _ in range(TURNS):
        assert np.array(outer(given)).tolist() == wanted


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("rows", [(2, 3), (2, 1), (1, 3)], ids=str)
def test_sums_of_unlike_sizes_end_in_an_error(rows, engine):
    """Of sizes that only the running step knows: one row would be added to each of the
    others', and with collectives replicas waited for ever."""
    strategy = make_strategy(2, engine=engine)
    parts = distribute(strategy, [tf.ones([count]) for count in rows])

    def total(x):
        kept = tf.boolean_mask(x, tf.ones_like(x, dtype=tf.bool))
        return tf.distribute.get_replica_context().all_reduce("sum", kept)

    with pytest.raises(tf.errors.InvalidArgumentError, match="size"):
        tf.function(lambda: strategy.run(total, (parts,)))()


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_sums_of_a_size_that_only_the_step_knows(engine):
    strategy = make_strategy(3, engine=engine)
    of_each = [[scale, 2 * scale, 3 * scale] for scale in (1.0, 10.0, 100.0)]
    parts = distribute(strategy, of_each)

    def total(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.boolean_mask(x, x < 1e6))

    found = tf.function(lambda: strategy.run(total, (parts,)))()
    for own in strategy.experimental_local_results(found):
        np.testing.assert_array_equal(own, [111.0, 222.0, 333.0])
