"""Replicas that meet in graphs: calls of one function, and sums of unlike sizes."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy

CALLS = 4
TURNS = 150


def parts_of(strategy, scale):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(scale * 10.0**context.replica_id_in_sync_group)
    )


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

    given = [parts_of(strategy, scale) for scale in range(1, CALLS + 1)]
    of_one = sum(10.0**rank for rank in range(replicas))
    wanted = [[scale * of_one] * replicas for scale in range(1, CALLS + 1)]
    for _ in range(TURNS):
        assert np.array(outer(given)).tolist() == wanted


def test_sums_of_unlike_sizes_end_in_an_error():
    """Of a size that is known only while the step runs; they waited for ever."""
    strategy = make_strategy(2, engine="tensorflow")
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([2 + context.replica_id_in_sync_group])
    )

    def total(x):
        kept = tf.boolean_mask(x, tf.ones_like(x, dtype=tf.bool))
        return tf.distribute.get_replica_context().all_reduce("sum", kept)

    with pytest.raises(tf.errors.InvalidArgumentError, match="unlike_sizes"):
        tf.function(lambda: strategy.run(total, (parts,)))()
