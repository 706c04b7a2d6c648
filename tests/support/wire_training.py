"""One training step whose gradients cross hosts in 16 bits, and what it should give.

    python -m tests.support.wire_training FILE SHARD WIRE_DTYPE

Under TFDP_* variables or mpiexec every worker takes one step per model and writes its
weights to FILE.name.rank.npz. The learning rate is 1: a step is the gradient.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model

ROWS = 24


class WithStatistics(keras.Model):
    """A dense layer, beside a normalization that only keeps its moving mean."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5)
        self.norm = keras.layers.BatchNormalization(
            momentum=0.0, center=False, scale=False
        )

    def call(self, inputs, training=False):
        self.norm(inputs, training=training)
        return self.dense(inputs)


def with_statistics():
    model = WithStatistics()
    model(np.zeros((1, 12), np.float32))
    return model


def with_embedding():
    tokens = keras.Input((6,), dtype="int32")
    # Of many words, of which few occur: a small table would travel as a whole.
    flat = keras.layers.Flatten()(keras.layers.Embedding(900, 5)(tokens))
    return keras.Model(tokens, keras.layers.Dense(5)(flat))


def tokens():
    return np.random.default_rng(1).integers(0, 9, (ROWS, 6)).astype("int32")


def images():
    return classification_data(ROWS)[0]


MODELS = {
    "dense": (dense_model, images),
    "statistics": (with_statistics, images),
    "embedding": (with_embedding, tokens),
}


def make(name):
    """The model with the same weights everywhere, its rows and labels."""
    keras.utils.set_random_seed(3)
    build, rows = MODELS[name]
    return build(), rows(), classification_data(ROWS)[1]


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def stepped(name, strategy):
    """The weights after one step of `fit`."""
    with strategy.scope():
        model, x, y = make(name)
        model.compile(keras.optimizers.SGD(1.0), crossentropy(), jit_compile=False)
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return model.get_weights()


def stepped_by_hand(strategy):
    """As `stepped("dense")`, by a loop and an optimizer that belongs to no model."""
    with strategy.scope():
        model, x, y = make("dense")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
    )

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = crossentropy(reduction="sum")(y, model(x, training=True)) / ROWS
        weights = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )

    @tf.function
    def step(batch):
        strategy.run(replica_step, args=batch)

    for batch in dataset:
        step(batch)
    return model.get_weights()


def gradients_of_hosts(name, hosts):
    """The weights before the step; each host's gradient; sizes of what it sends."""
    model, x, y = make(name)
    parts, magnitudes = [], []
    for host in range(hosts):
        mine = slice(ROWS * host // hosts, ROWS * (host + 1) // hosts)
        with tf.GradientTape() as tape:
            logits = model(x[mine], training=False)
            loss = crossentropy(reduction="sum")(y[mine], logits) / ROWS
        gradients = tape.gradient(loss, model.trainable_variables)
        # The rows of an embedding are added before a host sends them.
        parts.append([tf.convert_to_tensor(g).numpy() for g in gradients])
        magnitudes.append([np.abs(part) for part in parts[-1]])
    return [v.numpy() for v in model.trainable_variables], parts, magnitudes


def main(path, shard, wire_dtype):
    strategy = tfdp.MultiHostDataParallelStrategy(
        shard=shard,
        shard_min_bytes=0,
        communication=tfdp.Communication(wire_dtype=wire_dtype, timeout_seconds=60),
    )
    print("engine", strategy.engine_name, flush=True)
    rank = strategy.cluster.rank
    for name in MODELS:
        np.savez(f"{path}.{name}.{rank}.npz", *stepped(name, strategy))
    if shard == "none":  # an optimizer on its own knows nothing of shards
        np.savez(f"{path}.by-hand.{rank}.npz", *stepped_by_hand(strategy))


if __name__ == "__main__":
    os.environ.setdefault("TFDP_DEVICES_PER_WORKER", "2")
    main(*sys.argv[1:])
