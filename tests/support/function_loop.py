"""A loop of one's own around a step that is a `tf.function`.

    python -m tests.support.function_loop FILE

Under TFDP_* variables each worker trains with the loop in Python, and with it in a
graph, and writes the weights to FILE.rank.npz.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp

ROWS, BATCH = 23, 8  # the last batch leaves replicas with unlike rows
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.normal(size=(ROWS, 2)).astype("float32")


class Loop:
    """A loop of one's own, whose step is a method that `tf.function` decorates."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
            self.model = keras.Sequential([keras.Input((6,)), *layers])
            self.optimizer = keras.optimizers.SGD(0.1)
            self.optimizer.build(self.model.trainable_variables)

    @tf.function
    def step(self, x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((self.model(x, training=True) - y) ** 2, axis=-1)
            loss = tf.reduce_sum(errors) / BATCH
            if tf.size(x) > 0:  # AutoGraph makes a conditional of this
                loss *= 2.0
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def trained(self, in_graph):
        def run(batch):
            return self.strategy.run(self.step, args=batch)

        run = tf.function(run) if in_graph else run
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        dataset = self.strategy.experimental_distribute_dataset(dataset)
        for batch in [*dataset, *dataset]:
            run(batch)
        return [weight.numpy() for weight in self.model.weights]


def main(file):
    strategy = tfdp.MultiHostDataParallelStrategy()
    weights = [Loop(strategy).trained(in_graph) for in_graph in (False, True)]
    np.savez(f"{file}.{strategy.cluster.rank}.npz", *weights[0], *weights[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
