"""The order in which each of several hosts reads a set of records.

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


def main(folder, seeds):
    tfdp.MultiHostDataParallelStrategy()
    orders = {seed: order_of(folder, seed) for seed in seeds}
    # Those without a seed agree, too.
    unseeded = [int(x) for x in tf.data.Dataset.range(1000).shuffle(1000)]
    print("ORDERS", json.dumps([orders, unseeded]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2].split(","))))
