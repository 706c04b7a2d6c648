"""Runs a function of one's own on every replica, each with data of its own."""

import numpy as np
import tensorflow as tf

from tests.support.parity import make_strategy, stock_strategy, unequal_copies

STRATEGIES = {
    "tfdp-2": lambda: make_strategy(2),
    "tfdp-4": lambda: make_strategy(4),
    "tfdp-4-tensorflow": lambda: make_strategy(4, engine="tensorflow"),
    "tfdp-2x2": lambda: make_strategy(4, hierarchy=(2, 2)),
    "mirrored-2": lambda: stock_strategy(2),
    "mirrored-4": lambda: stock_strategy(4),
}


def samples(shape=(12, 3, 5), seed=0):
    """Samples of very different mean and size, so that no two replicas are alike."""
    rng = np.random.default_rng(seed)
    per_sample = (shape[0], *[1] * (len(shape) - 1))
    x = rng.normal(size=shape) * rng.uniform(0.2, 3.0, size=per_sample)
    return x + rng.normal(size=per_sample)


def replica_function(strategy, step, eager=False):
    """A function of one list of arrays (one per replica) for each argument of `step`;
    it gives the replicas' results, each a flat list."""

    def run(*arguments):
        return strategy.run(step, args=arguments)

    function = run if eager else tf.function(run)

    def call(*arguments):
        results = function(*(distribute(strategy, arrays) for arrays in arguments))
        local = map(strategy.experimental_local_results, tf.nest.flatten(results))
        return [[v.numpy() for v in values] for values in zip(*local, strict=True)]

    return call


def distribute(strategy, arrays):
    """`arrays[r]` on replica r."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(arrays[context.replica_id_in_sync_group])
    )


def assert_replicas_agree(layer):
    """Every weight of `layer` has the same bits on all replicas."""
    assert unequal_copies(layer.weights) == []
