"""Optimizers that send their momentum: gradients that differ, and updates by hand."""

import keras
import numpy as np
import tensorflow as tf

__all__ = ["BLOCK", "SHAPE", "drawn", "scaled_signs", "stepping", "updated"]

SHAPE, BLOCK = (8, 12), 32  # three blocks


def scaled_signs(values):
    blocks = values.reshape(-1, BLOCK)
    scales = np.abs(blocks).mean(axis=1, keepdims=True)
    return (np.where(blocks >= 0, 1, -1) * scales).reshape(SHAPE)


def drawn(replicas, steps=8):
    """Different on all replicas; the first two numbers never have a gradient."""
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(steps, replicas, *SHAPE)).astype("float32")
    gradients[:, :, 0, :2] = 0
    return gradients


def stepping(strategy, made, start=0.0):
    """A function that updates by the gradients of all replicas; weight; optimizer."""
    with strategy.scope():
        weight = keras.Variable(np.zeros(SHAPE, "float32") + start, name="w")
        used = made()
        used.build([weight])

    @tf.function
    def step(parts):
        strategy.run(lambda own: used.apply([own], [weight]), (parts,))

    def steps(gradients):
        for of_step in gradients:
            step(
                strategy.experimental_distribute_values_from_function(
                    lambda c, of_step=of_step: tf.constant(
                        of_step[c.replica_id_in_sync_group]
                    )
                )
            )
        return weight.numpy()

    return steps, weight, used


def updated(strategy, made, gradients, start=0.0):
    """The weights after each update, which all replicas have alike; the optimizer."""
    steps, weight, used = stepping(strategy, made, start)
    found = []
    for of_step in gradients:
        steps([of_step])
        copies = [copy.numpy() for copy in weight.value.values]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copies[0], copy)
        found.append(copies[0])
    return found, used
