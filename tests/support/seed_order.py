"""The order in which each of several hosts reads a set of records; what they draw.

python -m tests.support.seed_order FOLDER SEEDS
"""

import json
import sys

import tensorflow as tf

import tfdp


def order_of(folder, seed):
    """Two epochs in one row."""
    batches = tfdp.data.read_tfrecords(folder, 8, seed=seed)
    return [int(x) for _ in range(2) for batch in batches for x in batch["x"]]


def draws(strategy):
    """Two draws of each replica here, in a graph and eagerly, by tf.random."""

    def draw():
        return tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32)

    def replica_step():
        chosen = tf.cond(draw() >= 0, draw, lambda: 0)
        return draw(), chosen

    tf.random.set_seed(3)
    found = [strategy.run(replica_step), tf.function(strategy.run)(replica_step)]
    return [
        [int(value) for value in strategy.experimental_local_results(one)]
        for pair in found
        for one in pair
    ]


def main(folder, seeds):
    strategy = tfdp.MultiHostDataParallelStrategy()
    orders = {seed: order_of(folder, seed) for seed in seeds}
    # Those without a seed agree, too.
    unseeded = [int(x) for x in tf.data.Dataset.range(1000).shuffle(1000)]
    print("ORDERS", json.dumps([orders, unseeded]), flush=True)
    print("DRAWS", json.dumps(draws(strategy)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2].split(","))))
