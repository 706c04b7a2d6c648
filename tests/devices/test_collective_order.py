"""Devices in any order: TensorFlow's collectives rank them by name, replicas do not.

The references are one device and NumPy, both in the order of the replicas.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.over_nccl import step_of
from tfdp.exchange.collectives import Collectives, rearranged
from tfdp.plan.topology import Topology

pytestmark = pytest.mark.timeout(250)

ORDERS = {
    "natural": ["CPU:0", "CPU:1", "CPU:2"],
    "turned": ["CPU:2", "CPU:0", "CPU:1"],
    "swapped": ["CPU:0", "CPU:2", "CPU:1"],
}
TWO_HOSTS = ["CPU:3", "CPU:0", "CPU:1", "CPU:2"]


def strategy_of(devices, **options):
    shard = options.pop("shard", "none")
    communication = tfdp.Communication(engine="tensorflow", **options)
    return tfdp.DataParallelStrategy(
        devices=devices, communication=communication, shard=shard, shard_min_bytes=0
    )


def trained(strategy=None, steps_of=12):
    """The weights after four steps; momentum, so that shards of state matter too."""
    random = np.random.default_rng(7)
    inputs = random.normal(size=(24, 8)).astype("float32")
    targets = random.normal(size=(24, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        layers = [keras.Input((8,)), *map(keras.layers.Dense, (64, 30, 3))]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(inputs, targets, batch_size=steps_of, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def assert_as_on_one_device(strategy):
    for own, expected in zip(trained(strategy), trained(), strict=True):
        # Weights are about 0.3 and move by 0.05 in four steps; each of the four
        # gradients is off by some roundings of 6e-8 of its size: below 1e-6. What
        # replicas take for their shards when they are another's is off by 1e-2.
        np.testing.assert_allclose(own, expected, atol=1e-6)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("order", ["turned", "swapped"])
def test_shards_are_the_replicas_own(order, shard):
    assert_as_on_one_device(strategy_of(ORDERS[order], shard=shard))


@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_two_levels_in_another_order(shard):
    assert_as_on_one_device(strategy_of(TWO_HOSTS, shard=shard, hierarchy=(2, 2)))


def exchange(devices, replica, hierarchy=None):
    """What `replica(engine, rank)` gives on each rank, and the graph of it."""
    count = len(devices)
    engine = Collectives(devices, Topology(*(hierarchy or (1, count))), hint="ring")
    step = step_of(engine, replica)
    return [one.numpy() for one in step()], step.get_concrete_function().graph


@pytest.mark.quick
@pytest.mark.parametrize("order", ORDERS)
def test_gathers_are_in_the_order_of_the_replicas(order):
    # Each brings as many rows as its number, and one.
    results, _ = exchange(
        ORDERS[order],
        lambda engine, rank: engine.gather(10 * rank + tf.range(rank + 1), rank),
    )
    for result in results:
        np.testing.assert_array_equal(result, [0, 10, 11, 20, 21, 22])


@pytest.mark.parametrize("order", ORDERS)
def test_rows_go_to_the_replica_of_their_number(order):
    results, _ = exchange(
        ORDERS[order],
        lambda engine, rank: engine.all_to_all(
            tf.constant([[100 * rank + to, -rank] for to in range(3)]), rank, "rows"
        ),
    )
    for rank, result in enumerate(results):
        expected = [[100 * sender + rank, -sender] for sender in range(3)]
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_words_of_replicas_are_joined_in_their_order(order):
    results, _ = exchange(
        ORDERS[order],
        lambda engine, rank: engine.start(tf.constant([rank, rank + 7]), rank, "words")[
            0
        ],
    )
    for result in results:
        np.testing.assert_array_equal(result, [[0, 7], [1, 8], [2, 9]])


@pytest.mark.parametrize("hierarchy", [(1, 4), (2, 2)])
def test_sums_of_unknown_length_on_both_levels(hierarchy):
    numbers = np.random.default_rng(3).integers(-9, 9, (4, 7)).astype("float32")

    def replica(engine, rank):
        own = tf.constant(numbers[rank])
        length = tf.constant(7) * tf.cast(tf.timestamp() > 0, tf.int32)
        return engine.all_reduce([own[:length]], rank, "sum")[0]

    results, _ = exchange(TWO_HOSTS, replica, hierarchy)
    for result in results:
        # Whole numbers: no order of addition rounds.
        np.testing.assert_array_equal(result, numbers.sum(axis=0))


@pytest.mark.parametrize("order", ORDERS)
def test_only_another_order_costs_an_operation(order):
    _, graph = exchange(
        ORDERS[order],
        lambda engine, rank: engine.all_to_all(tf.fill([3, 1], rank), rank, "rows"),
    )
    moves = [op for op in graph.get_operations() if op.type == "GatherV2"]
    assert len(moves) == (0 if order == "natural" else 6)


def test_the_order_is_asked_for_where_functions_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        engine = Collectives(ORDERS["turned"], Topology(1, 3), hint="ring")
        # TensorFlow's first is CPU:0, which is replica 1.
        assert engine._order(engine._group(0)) == (1, 2, 0)
    finally:
        tf.config.run_functions_eagerly(False)


def test_rows_are_moved_whole():
    rows = tf.reshape(tf.range(12), [6, 2])
    moved = rearranged(rows, (2, 0, 1))
    expected = [[8, 9], [10, 11], [0, 1], [2, 3], [4, 5], [6, 7]]
    np.testing.assert_array_equal(moved, expected)
    assert rearranged(rows, (0, 1, 2)) is rows
    assert rearranged(tf.zeros([0, 4]), (1, 0)).shape == (0, 4)
